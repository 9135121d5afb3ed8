"""Two drafters that take turns: which one drafts, from which distribution; who is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    decode,
    first_state,
    greedy,
    make_session,
    mixed,
    random_distribution,
    rounds,
)
from heads import eagle_drafter
from test_drafters import context_of, silence
from test_eagle import assert_fresh

import specjax
from specjax import trees
from specjax.drafters import draft_model, early_exit, fallback, ngram, stateless, unmoved
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.testing import check_drafter

VOCAB, ROWS = 8, 20_000


@pytest.fixture(scope="module")
def target():
    shape = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4)
    return random_model(tiny_config(vocab_size=VOCAB, num_layers=2, **shape), 0, dtype="float32")


def lookup():
    return ngram.make(prompt_lookup_min=2)


def model():
    return early_exit.make(2, exit_layer=1)


def says(token, length):
    """A drafter that always proposes the same, as long as it may."""

    def propose(params, state, context, noise):
        tokens = jnp.full((context.length.shape[0], context.num_tokens), token, jnp.int32)
        return trees.chain(tokens, context.limit), state

    return Drafter(f"says {token}", stateless, propose, unmoved, num_speculative_tokens=length)


def test_the_second_drafts_where_the_first_has_nothing_to_say():
    rows = [[1, 2, 3, 4, 1, 2], [5, 6, 8], [7, 7, 7], [1, 2, 1, 2]]
    drafter = fallback.make(ngram.make(), says(9, 3))
    assert drafter.name == "ngram+says 9"
    assert drafter.num_speculative_tokens == 8
    # The third row is finished, the last one near its end.
    context = context_of(rows, [6, 6, 0, 1], 6)
    draft, state = drafter.propose((None, None), ((), ()), context, silence)
    assert state == ((), ())
    assert draft.valid.sum(axis=1).tolist() == [6, 3, 0, 1]
    assert draft.tokens[0].tolist() == [3, 4, 1, 2, 3, 4]
    assert draft.tokens[1, :3].tolist() == [9, 9, 9]
    assert draft.tokens[3, 0] == 1
    assert (draft.logq_row == -1).all()
    assert draft.logq is None
    assert trees.is_chain(draft)


def test_three_take_turns():
    three = fallback.make(fallback.make(ngram.make(prompt_lookup_min=3), ngram.make()), says(9, 2))
    context = context_of([[1, 2, 3, 4, 1, 2], [5, 6, 8]], [4, 4], 4)
    draft, _ = three.propose(((None, None), None), (((), ()), ()), context, silence)
    assert draft.tokens[:, 0].tolist() == [3, 9]


@pytest.mark.usefixtures("fast_programs")
@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_the_distribution_is_the_targets(rule, target):
    check = check_drafter(fallback.make(lookup(), model()), target, ROWS, verify=rule)
    assert check.passed, check
    assert check.acceptance_length > 1.3


@pytest.mark.usefixtures("fast_programs")
def test_two_that_draw_from_distributions(target):
    """Some rows stop before the first token, and the other's distributions come after."""
    first = dataclasses.replace(random_distribution(target), num_speculative_tokens=2)
    check = check_drafter(fallback.make(first, model()), target, ROWS)
    assert check.passed, check
    assert check.acceptance_length > 1.2


def draws_in_secret(table):
    """A distribution that nobody is told: its tokens are drawn, and it goes on by what it drew."""

    def propose(params, state, context, noise):
        token = jnp.argmax(table[None, :] + noise(0), axis=-1).astype(jnp.int32)
        tokens = jnp.broadcast_to(token[:, None], (token.shape[0], context.num_tokens))
        return trees.chain(tokens, jnp.where(token < 3, context.limit, 0)), state

    return Drafter("secret", stateless, propose, unmoved, num_speculative_tokens=1)


@pytest.mark.usefixtures("fast_programs")
def test_what_the_first_drew_in_secret_tells_nothing_of_the_second(target):
    table = jax.random.normal(jax.random.key(3), (VOCAB,))
    check = check_drafter(fallback.make(draws_in_secret(table), model()), target, ROWS)
    assert check.passed, check


def same_noise(first, second):
    """Both draw from the noise that the other one has seen."""
    drafter = fallback.make(draws_in_secret(jnp.zeros(VOCAB)), second)

    def propose(params, state, context, noise):
        return drafter.propose(params, state, context, lambda depth: noise(depth // 2))

    return dataclasses.replace(drafter, propose=propose)


def every_node_was_drawn(first, second):
    """Says of a copy, too, that it was drawn from a distribution."""
    drafter = fallback.make(first, second)

    def propose(params, state, context, noise):
        draft, state = drafter.propose(params, state, context, noise)
        distribution = jnp.broadcast_to(jnp.arange(draft.logq_row.shape[1]), draft.logq_row.shape)
        return draft.replace(logq_row=distribution), state

    return dataclasses.replace(drafter, propose=propose)


def chooses_by_what_was_drawn(first, second):
    """Takes the copy only where the other one drew something else."""
    drafter = fallback.make(first, second)

    def propose(params, state, context, noise):
        copied, _ = first.propose(params[0], state[0], context, noise)
        drawn, _ = second.propose(params[1], state[1], context, noise)
        other = copied.tokens[:, :1] != drawn.tokens[:, :1]
        copied = copied.replace(valid=copied.valid & other)
        return fallback.joined(copied, drawn, context.num_tokens), state

    return dataclasses.replace(drafter, propose=propose)


@pytest.mark.usefixtures("fast_programs")
@pytest.mark.parametrize("broken", [every_node_was_drawn, chooses_by_what_was_drawn, same_noise])
def test_broken_variants_fail(broken, target):
    check = check_drafter(broken(lookup(), model()), target, ROWS)
    assert not check.passed
    assert check.chi2 > 2 * check.threshold


def test_a_head_follows_what_another_drafted(tiny):
    drafter = fallback.make(ngram.make(prompt_lookup_min=1), eagle_drafter(tiny, spread=0.3))
    assert drafter.features == eagle_drafter(tiny).features
    session = make_session(
        tiny,
        PROMPTS,
        drafter=drafter,
        num_speculative_tokens=3,
        sampling=mixed(max_new_tokens=12),
    )
    alone = dataclasses.replace(session, drafter=eagle_drafter(tiny, spread=0.3))
    state = first_state(session)
    for state in rounds(session, state):
        assert_fresh(alone, state.replace(drafter=state.drafter[1]))
    assert np.asarray(state.rounds.accepted).max() > 1


def sized_by_context(length):
    """A drafter whose state is as wide as its drafts."""

    def init(params, context, features):
        return jnp.zeros((context.length.shape[0], context.num_tokens), jnp.int32)

    def propose(params, state, context, noise):
        return trees.chain(state, context.limit), state

    def observe(params, state, context, accepted):
        return state + init(params, context, {})

    return Drafter("sized", init, propose, observe, num_speculative_tokens=length)


@pytest.mark.parametrize("most", [None, 3, *slow(0, 16)])
def test_each_drafts_at_most_its_own_number(most, tiny):
    drafter = fallback.make(ngram.make(), sized_by_context(2))
    requests = greedy(max_new_tokens=20)
    got = decode(tiny, PROMPTS, drafter=drafter, sampling=requests, num_speculative_tokens=most)
    plain = decode(tiny, PROMPTS, sampling=requests)
    assert got.token_ids == plain.token_ids
    longest = 8 if most is None else min(most, 8)
    assert got.drafted.max() == longest
    if most is None:
        # Each has a compiled width of its own.
        assert make_session(tiny, PROMPTS, drafter=drafter).plan.widths == (1, 3, 9)
        assert set(np.unique(got.width)) <= {-1, 1, 3, 9}


def test_by_name(tiny):
    drafter = specjax.make_drafter("ngram+early_exit", tiny, prompt_lookup_min=1, exit_layer=2)
    assert drafter.name == "ngram+early_exit"
    assert drafter.sampled
    shorter = specjax.make_drafter("ngram+early_exit", tiny, num_speculative_tokens=3)
    assert shorter.num_speculative_tokens == 3
    assert shorter.lengths == (3, 3)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ngram+", {}, r"drafter='ngram\+': join different drafters"),
        ("ngram+ngram", {}, "join different drafters"),
        ("ngram+none", {}, "none cannot be joined by name: it drafts nothing"),
        ("ngram+draft_model", {"path": "x"}, "only follows drafts that it made itself"),
        ("ngram+simulated", {}, "simulated cannot be joined by name"),
        ("ngram+test_drafters:make_own", {}, "specjax.drafters.fallback can join it"),
        ("ngram+earlyexit", {}, "'earlyexit' is unknown: did you mean early_exit"),
        ("ngram+early_exit", {"noise": 1}, r"drafter.noise=1: no part of ngram\+early_exit takes"),
        ("ngram+early_exit", {"path": "x"}, r"drafter.path='x': of ngram\+early_exit no part co"),
        ("medusa+eagle3", {"path": "x"}, r"of medusa\+eagle3 medusa, eagle3 could take it"),
    ],
)
def test_bad_input(name, options, said, tiny):
    with pytest.raises(InputError, match=said):
        specjax.make_drafter(name, tiny, **options)


def test_a_draft_model_cannot_follow_what_another_drafted(tiny):
    own = draft_model.make(tiny.architecture, tiny.params)
    for pair in ((ngram.make(), own), (own, ngram.make())):
        with pytest.raises(InputError, match="'draft_model' only follows drafts that it made"):
            fallback.make(*pair)
