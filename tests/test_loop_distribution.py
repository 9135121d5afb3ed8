"""Three tokens over several rounds have the target's joint distribution; broken variants fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import row_count, slow
from decoding import Deciding, changed, device_limits, draft_model
from tiny_models import bigrams, small_model

from specjax import sampling
from specjax.core import initial_state
from specjax.core import round as one_round
from specjax.core.drafter import StepLimits
from specjax.core.none import NoDrafter
from specjax.drafters import LoadedDrafter, take_turns
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.sampling import Decision, Rejection
from specjax.testing import check_drafter
from specjax.testing.drafter_check import (
    chi_square,
    conditional_distributions,
    decode,
    first_rows,
    make_plan,
    output_distribution,
)

VOCAB = 8
# Each rule has a test of many rows; what drafts, or is broken, shows in fewer.
MANY, FEWER = 40_000, 12_000
PROMPT = (1, 2, 3, 1, 2)
AS_IS = SamplingParams(temperature=1.0)
COLD = SamplingParams(temperature=0.6)


def distance(target, draft, prompt=PROMPT, request=AS_IS, **draft_options):
    """The mean total variation between target and draft, over all of four tokens."""
    model = [
        (m.architecture, m.params) if hasattr(m, "architecture") else m for m in (target, draft)
    ]
    p = conditional_distributions(*model[0], prompt, request, 4)
    q = conditional_distributions(*model[1], prompt, request, 4, **draft_options)
    reach = 1.0
    distances = []
    for here, there in zip(p, q, strict=True):
        each = 0.5 * np.abs(here - there).sum(axis=1)
        distances.append(np.sum(reach * each))
        reach = (np.reshape(reach, (-1, 1)) * here).ravel()
    return np.mean(distances)


@pytest.fixture(scope="module")
def target():
    return small_model(VOCAB)


@pytest.fixture(scope="module")
def draft():
    return small_model(VOCAB, 1, seed=1)


@pytest.fixture(scope="module")
def tables():
    """A bigram target and a bigram draft."""
    model, table = bigrams(VOCAB)
    return (model, table), (model, table + 0.9 * jax.random.normal(jax.random.key(1), table.shape))


def test_a_prompt_of_one_token_and_a_warp(target, draft):
    request = SamplingParams(temperature=0.9, top_k=7, top_p=0.97, min_p=0.02)
    assert 0.2 < distance(target, draft, (4,), request) < 0.6
    drafter = draft_model(draft, draft_p_min=0.3)
    check = check_drafter(drafter, target, row_count(FEWER), prompt=(4,), request=request)
    assert check.passed, check
    assert check.acceptance_length > 1.2


EXACT = {
    "plain": (lambda draft: NoDrafter(), {}),
    "sampled": (draft_model, {}),
    "greedy_nodes": (functools.partial(draft_model, draft_sample_method="greedy"), {}),
    "p_min": (functools.partial(draft_model, draft_p_min=0.4), {}),
    "limits": (
        functools.partial(draft_model, num_speculative_tokens=3),
        {"num_speculative_tokens": 3, "limits": device_limits([2], [0.4])},
    ),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("sampled", "block"),
        ("greedy_nodes", "rejection"),
        # Pairs of rows have a test of their own (test_limits_distribution).
        # What broken variants are compared with drafts as the first (below).
        # A bar of confidence is in the test of a warp (above).
        *slow(("p_min", "block"), ("greedy_nodes", "block")),
        *slow(*((name, "rejection") for name in ("sampled", "limits", "plain"))),
    ],
)
def test_tables(name, rule, tables):
    target, draft = tables
    make, options = EXACT[name]
    drafter = make(draft)
    rows = row_count(MANY if name == "sampled" else FEWER)
    check = check_drafter(drafter, target, rows, prompt=PROMPT, verify=rule, **options)
    assert check.passed, check
    assert (check.acceptance_length > 1.2) == (name != "plain")


def test_coupled_at_many_seeds_is_the_target_distribution(tables):
    target, draft = tables
    check = check_drafter(draft_model(draft), target, row_count(MANY), verify="coupled")
    assert check.passed, check
    assert check.acceptance_length > 1.2


def test_the_tables_differ_as_they_should(tables):
    assert 0.2 < distance(*tables) < 0.6
    assert 0.2 < distance(*tables, request=COLD) < 0.6


def test_a_length_that_follows_the_neighbours_is_exact(tables):
    """Rows of one batch end at a stop token of their own, and the others then draft more."""
    target, draft = tables
    drafter = draft_model(draft)
    model, params = target
    groups, batch, length = FEWER, 3, 3
    capacity = len(PROMPT) + length + 2
    turns, drafter_params = take_turns(drafter)
    plan = make_plan(model, turns, 2, verify=Rejection(), request=AS_IS, capacity=capacity)

    @jax.jit
    def one(group):
        index = batch * group + jnp.arange(batch)
        tokens, rows, size, status, *_ = first_rows(plan, PROMPT, AS_IS, index, 0)
        # The first row continues; the others end where they emit an even token.
        stops = jnp.where(jnp.arange(batch)[:, None] == 0, -1, 2 * jnp.arange(VOCAB // 2)[None, :])
        rows = rows.replace(stop_ids=stops.astype(jnp.int32))
        state = initial_state.start(plan, (params, drafter_params), tokens, rows, size, status)

        def advance(state, _):
            limits = StepLimits(batch - state.active.sum(keepdims=True), jnp.zeros(1))
            state, counts, _ = one_round.one_round(plan, (params, drafter_params), state, limits)
            return state, counts.drafted[0]

        state, drafted = jax.lax.scan(advance, state, length=length)
        return state.tokens[0], drafted

    tokens, drafted = jax.vmap(one)(jnp.arange(groups))
    assert set(np.unique(drafted)) == {0, 1, 2}
    outputs = np.asarray(tokens)[:, len(PROMPT) : len(PROMPT) + length]
    code = np.ravel_multi_index(tuple(outputs.T), (VOCAB,) * length)
    found = chi_square(
        np.bincount(code, minlength=VOCAB**length),
        output_distribution(*target, PROMPT, AS_IS, length),
    )
    assert found.statistic < found.threshold


def as_it_is(draft, context):
    return draft


def unwarped(draft, context):
    """Claims the distribution as it was before the temperature."""
    heat = context.sampling.temperature[:, None, None]
    return draft.replace(logq=jax.nn.log_softmax(draft.logq * heat))


def stops_at_unlikely_tokens(draft, context):
    """Keeps a token only if its own probability is high."""
    own = jnp.take_along_axis(draft.logq, draft.tokens[:, :, None], axis=2)[..., 0]
    keep = jnp.cumprod(own > jnp.log(0.3), axis=1).astype(bool)
    return draft.replace(valid=draft.valid & keep)


def claims_a_distribution(draft, context):
    """Takes the likeliest token, and says that it was drawn from the distribution."""
    return draft.replace(tokens=jnp.argmax(draft.logq, axis=2).astype(jnp.int32))


def residual_is_p(tokens, num_valid, target, draft, uniforms):
    accepted, _ = sampling.rejection(tokens, num_valid, target, draft, uniforms)
    return Decision(accepted, target(accepted))


def drafts_with_noise_of(use, depth_of=lambda depth: depth):
    """Gives drafts the noise that verification uses for something else."""

    def noise(keys, vocab):
        used = getattr(sampling.split_keys(keys), use)

        def at(depth):
            numbers = jnp.broadcast_to(depth_of(depth), used.shape)
            return sampling.position_gumbel(used, numbers, vocab)

        return sampling.SharedNoise(at)

    return lambda monkeypatch: monkeypatch.setattr(sampling, "draft_noise", noise)


def same_noise_every_round(monkeypatch):
    real = one_round.noise_keys
    monkeypatch.setattr(
        one_round,
        "noise_keys",
        lambda plan, params, state: real(plan, params, state.replace(round=0 * state.round)),
    )


BROKEN = {
    "draft_and_final_share_noise": {"patch": drafts_with_noise_of("final", lambda depth: 0)},
    "noise_once_a_prompt": {"patch": same_noise_every_round},
    "unwarped_distribution": {"request": COLD, "change": unwarped},
    "own_probability": {"change": stops_at_unlikely_tokens},
    "distribution_of_a_sure_token": {"change": claims_a_distribution},
    "draft_and_accept_share_noise": {"patch": drafts_with_noise_of("accept")},
    "residual_is_p": {"rule": Deciding(residual_is_p)},
}
CHANGES = [as_it_is, *(one["change"] for one in BROKEN.values() if "change" in one)]


@pytest.fixture(scope="module")
def changed_by(tables):
    """Makes the drafter with one of the changes: each time the same value, so one program."""

    def propose(real, params, *arguments):
        own, number = params
        draft, state = real(own, *arguments)
        changes = [functools.partial(change, draft, arguments[1]) for change in CHANGES]
        return jax.lax.switch(number, changes), state

    def observe(real, params, *arguments):
        return real(params[0], *arguments)

    loaded = draft_model(tables[1])
    same = changed(loaded.drafter, propose=propose, observe=observe).drafter
    return lambda change: LoadedDrafter(same, (loaded.params, jnp.int32(CHANGES.index(change))))


@pytest.mark.parametrize(
    "name",
    # Rules that are wrong by themselves are found by enumeration as well (test_chain_enumeration).
    [*list(BROKEN)[:5], *slow(*list(BROKEN)[5:])],
)
def test_broken_variants_fail(name, tables, changed_by, monkeypatch):
    variant = BROKEN[name]
    target, draft = tables
    # A value of its own, so that no program of another test is used.
    drafter = changed(draft_model(draft))
    if "change" in variant:
        drafter = changed_by(variant["change"])
    if "patch" in variant:
        variant["patch"](monkeypatch)
    rule, request = variant.get("rule", "rejection"), variant.get("request", AS_IS)
    check = check_drafter(drafter, target, FEWER, prompt=PROMPT, verify=rule, request=request)
    assert not check.passed
    assert check.chi2 > 2 * check.threshold
    # What was drawn too often or too seldom is shown, with both probabilities.
    worst = check.worst
    assert abs(worst.share - worst.probability) > 5 * np.sqrt(worst.probability / check.rows)
    assert f"worst=tokens {worst.tokens} in {worst.share:.2%} of the rows, not" in repr(check)


def test_the_broken_variants_fail_for_their_mistake_alone(tables, changed_by):
    """Untouched, and at their own temperature, the same drafter passes."""
    same = changed_by(as_it_is)
    check = check_drafter(same, tables[0], row_count(FEWER), prompt=PROMPT, request=COLD)
    assert check.passed, check


@pytest.mark.parametrize(("length", "rounds"), [(2, {1, 2, 3}), *slow((1, {2, 3}))])
def test_the_three_tokens_come_from_as_many_rounds_as_is_said(length, rounds, tables):
    """The last of them never from the first round, so that a later one is always tested too."""
    (model, table), draft = tables
    turns, params = take_turns(draft_model(draft))
    capacity = len(PROMPT) + 2 * length + 2
    plan = make_plan(model, turns, length, verify=Rejection(), request=AS_IS, capacity=capacity)
    _, counts = decode(plan, (table, params), PROMPT, AS_IS, np.arange(2000), 0, length + 2)
    ends = np.cumsum(np.maximum(counts.emitted, 0), axis=1)
    # The round of the K-th token to the (K+2)-th: the first after which it is there.
    which = np.argmax(ends[:, :, None] >= length + np.arange(3), axis=1)
    assert {len(set(row)) for row in which.tolist()} == rounds
    assert (which[:, 2] > 0).all()


def test_a_check_is_readable(tables):
    check = check_drafter(NoDrafter(), tables[0], rows=2000, prompt=PROMPT)
    assert repr(check).startswith("Check(passed=True, chi2=")
    assert check.threshold > check.chi2
    assert check.rows == 2000
    assert check.acceptance_length == 1


def test_bad_input_names_the_remedy(tables, tiny):
    with pytest.raises(InputError, match=r"vocabulary of 61 tokens.*at most 16.*Tabular"):
        check_drafter(NoDrafter(), tiny)
    for options, says in (
        (dict(num_speculative_tokens=6), r"num_speculative_tokens=6 .*lower it"),
        (dict(num_speculative_tokens=-1), "num_speculative_tokens=-1"),
        (dict(rows=0), "rows=0"),
        (dict(prompt=()), r"prompt=\(\): use a list of at least 1"),
        (dict(prompt=(8,)), r"prompt\[0\]=8: use a whole number from 0 to 7"),
    ):
        with pytest.raises(InputError, match=says):
            check_drafter(NoDrafter(), tables[0], **options)


def test_an_impossible_output_is_never_excused():
    counted = np.array([500, 499, 1])
    assert chi_square(counted, np.array([0.5, 0.5, 0.0])).statistic == np.inf
    fair = chi_square(np.array([500, 500, 0]), np.array([0.5, 0.5, 0.0]))
    assert fair.statistic < fair.threshold
