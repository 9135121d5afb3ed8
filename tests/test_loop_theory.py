"""Acceptance and tokens per round are what the distributions of target and draft imply."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, decode, draft_model, drafters, make_call

from specjax import theory
from specjax.drafters import take_turns
from specjax.engine.generate import decode_requests, expected_acceptance, open_engine
from specjax.engine.requests import SamplingParams, groups
from specjax.methods.ngram import Ngram
from specjax.sampling import RULES
from specjax.testing import Tabular
from specjax.testing.drafter_check import decode as decode_rows
from specjax.testing.drafter_check import make_plan

VOCAB, LENGTH, ROWS, ROUNDS = 8, 3, 4000, 6
AS_IS = SamplingParams(temperature=1.0)


def counts(target, drafter, rule="rejection", prompt=(1, 2), length=LENGTH, rounds=ROUNDS):
    """Accepted tokens of full drafts, [rows, rounds]."""
    model, params = target
    room = len(prompt) + (rounds + 1) * (length + 1)
    turns, drafter_params = take_turns(drafter)
    verify = RULES[rule]
    plan = make_plan(model, turns, length, verify=verify, request=AS_IS, capacity=room)
    params = params, drafter_params
    _, counted = decode_rows(plan, params, prompt, AS_IS, np.arange(ROWS), 0, rounds)
    assert (np.asarray(counted.drafted)[:, :rounds] == length).all()
    return np.asarray(counted.accepted)[:, :rounds]


def assert_close(values, expected, errors=5):
    """The mean of independent values is the expectation, within five standard errors."""
    values = np.asarray(values, np.float64).ravel()
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) <= errors * error, (values.mean(), expected, error)


@pytest.fixture(scope="module")
def free():
    """Two context-free models, and the overlap of their distributions."""
    p = jax.random.normal(jax.random.key(0), (VOCAB,))
    q = p + 0.8 * jax.random.normal(jax.random.key(1), (VOCAB,))
    alpha = float(jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum())
    assert 0.5 < alpha < 0.8
    return (Tabular(VOCAB), p), (Tabular(VOCAB), q), alpha


def test_rejection_accepts_the_overlap(free):
    target, draft, alpha = free
    accepted = counts(target, draft_model(draft))
    tested = np.minimum(accepted + 1, LENGTH)
    # One entry a test that was made: passed or not.
    passed = np.repeat([1, 0], [accepted.sum(), (tested - accepted).sum()])
    assert_close(passed, alpha)
    assert_close(accepted + 1, theory.expected_tokens(alpha, LENGTH))


def test_coupled_accepts_between_its_bounds(free):
    """(1 - TV) / (1 + TV) <= acceptance <= 1 - TV (Daliri et al. 2408.07978)."""
    target, draft, alpha = free
    accepted = counts(target, draft_model(draft), "coupled")
    rate = accepted.sum() / np.minimum(accepted + 1, LENGTH).sum()
    assert alpha / (2 - alpha) < rate < alpha


@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_a_sure_token_is_accepted_as_often_as_the_target_draws_it(rule, free):
    target, (model, q), _ = free
    drafter = draft_model((model, q), draft_sample_method="greedy")
    alpha = float(jax.nn.softmax(target[1])[jnp.argmax(q)])
    accepted = counts(target, drafter, rule)
    assert_close(accepted + 1, theory.expected_tokens(alpha, LENGTH))


def test_the_target_as_its_own_draft_accepts_everything(free):
    target, _, _ = free
    for rule in ("rejection", "block", "coupled"):
        assert (counts(target, draft_model(target), rule) == LENGTH).all()


@pytest.mark.parametrize("names", [("early_exit",), *slow((("ngram",),))], ids="+".join)
def test_what_a_run_recorded_predicts_its_acceptance(names, tiny, unrelated, similar):
    """Sampled and deterministic nodes, by the very distributions of the run."""
    prompts = PROMPTS * 6
    for name in names:
        drafter = drafters(tiny, unrelated, similar)[name]
        options = dict(
            drafter=drafter,
            sampling=SamplingParams(temperature=0.9, max_new_tokens=40),
            num_speculative_tokens=2,
            batch_size=48,
        )
        expected = expected_acceptance(*make_call(tiny, prompts, **options))
        got = decode(tiny, prompts, **options)
        participated = got.emitted > 0
        accepted, drafted = got.accepted[participated], got.drafted[participated]
        tested = np.minimum(accepted + 1, drafted)
        assert expected.num_nodes == tested.sum()
        rate = accepted.sum() / tested.sum()
        assert abs(rate - expected.mean) < 5 * expected.decision_error


def test_lengths_that_followed_other_rows_are_those_that_are_predicted(tiny):
    """By the counts of the run: alone, each row would have drafted otherwise."""
    options = dict(
        drafter=Ngram(prompt_lookup_min=1),
        sampling=[SamplingParams(temperature=0.9, max_new_tokens=4 + 3 * row) for row in range(8)],
        num_speculative_tokens_per_batch_size=[(1, 3, 2), (4, 8, 0)],
    )
    call = make_call(tiny, PROMPTS, batch_size=8, **options)
    # What decodes and what records is one plan.
    call = call.with_loop(overlaps=True)
    batches = groups(call.requests, 4)
    engine = open_engine(call.plan, 2)
    results = [decode_requests(call.plan, batch, engine=engine) for batch in batches]
    expected = expected_acceptance(*call, results)
    tested = 0
    for got in results:
        participated = got.emitted > 0
        drafted = got.drafted[participated]
        tested += np.minimum(got.accepted[participated] + 1, drafted).sum()
    assert expected.num_nodes == tested
    assert expected_acceptance(*call).num_nodes != tested
