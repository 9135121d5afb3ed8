"""Drafters that draft together: one tree of what all of them say, and who is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    changed,
    columns,
    decode,
    first_state,
    make_call,
    mixed,
    observed,
    random_distribution,
    rounds,
)
from test_drafters import context_of, silence
from test_pair_heads import assert_alike, drafter_of, fresh
from test_turn_taking import Bigrams, lookup, model, says
from tiny_models import bigrams

import specjax
from specjax import sampling, trees
from specjax.drafters import LoadedDrafter, merge_drafters, take_turns
from specjax.errors import InputError
from specjax.methods.ngram import Ngram
from specjax.testing import Tabular, check_drafter

VOCAB, ROWS = 5, 8_000


@pytest.fixture(scope="module")
def target():
    return bigrams(VOCAB)


def test_each_row_gets_what_all_say():
    drafter, params = merge_drafters(Ngram(num_matches=2), says(9, 3))
    assert drafter.name == "ngram|says 9"
    assert (drafter.num_speculative_tokens, drafter.num_nodes) == (8, 19)
    shorter = dataclasses.replace(drafter, num_speculative_tokens=2)
    assert [part.num_speculative_tokens for part in shorter.parts] == [2, 2]
    # None gets longer than it is.
    assert dataclasses.replace(drafter, num_speculative_tokens=30) == drafter
    context = context_of([[1, 2, 9, 9, 1, 2], [5, 6, 8], [7, 7, 7], [1, 2, 1, 2]], [3, 3, 0, 1])

    @jax.jit
    def propose():
        return drafter.propose(params, ((), ()), context, silence)

    draft, state = propose()
    assert state == ((), ())
    assert draft.valid.sum(axis=1).tolist() == [4, 3, 0, 2]
    assert draft.tokens[0, :4].tolist() == [9, 9, 1, 9]
    assert draft.topology.row_parents[0, :4].tolist() == [0, 1, 2, 2]
    assert draft.tokens[3, :2].tolist() == [1, 9]
    assert [draft.drafted_by[row, :4].tolist() for row in (0, 3)] == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert draft.logq is None


def test_what_is_drawn_comes_first(target):
    drafter, params = merge_drafters(lookup(), model(target), random_distribution(VOCAB))
    assert drafter.sampled
    context = context_of([[1, 2, 1], [3, 4, 3]], [2, 2], VOCAB).replace(needs_logq=True)
    context = context.replace(flags=dataclasses.replace(context.flags, sampled=True))
    noise = sampling.draft_noise(jax.vmap(jax.random.key)(jnp.arange(2)), VOCAB)

    @jax.jit
    def propose():
        return drafter.propose(params, ((), (), ()), context, noise)[0]

    draft = propose()
    assert draft.logq.shape == (2, 6, VOCAB)
    drawn = np.asarray(draft.logq_row >= 0)
    parents = np.asarray(draft.topology.row_parents)
    for row in range(2):
        for slot in range(4):
            siblings = drawn[row, np.asarray(draft.valid[row]) & (parents[row] == slot)]
            assert (np.diff(siblings.astype(int)) <= 0).all()


def broken(loaded, noises, merge):
    """Merged drafters of which some may see others' noise, and that are merged otherwise."""
    parts = loaded.drafter.parts

    def propose(real, params, state, context, noise):
        drafts = [
            dataclasses.replace(part, num_speculative_tokens=2).propose(
                params[i], (), context, noise.part(noises[i], branches=part.branches)
            )[0]
            for i, part in enumerate(parts)
        ]
        return merge(trees.side_by_side(*drafts)), state

    return changed(loaded, propose=propose)


def without_any_duplicate(draft):
    """Drops what was drawn where a sibling before it has its token."""
    # Any number below 0 says that a node was not drawn.
    merged = trees.merge_duplicates(draft.replace(logq_row=-2 - draft.logq_row))
    return merged.replace(logq_row=-2 - merged.logq_row)


@pytest.mark.parametrize(
    ("second", "noises", "merge", "exact"),
    [
        ([0.01, 0.35, 0.64], (0, 1), without_any_duplicate, False),
        ([0.02, 0.58, 0.40], (0, 0), trees.merge_duplicates, False),
        ([0.01, 0.35, 0.64], (0, 1), trees.merge_duplicates, True),
    ],
)
def test_broken_variants_fail(second, noises, merge, exact):
    """A dropped sampled duplicate, and one noise for two that draw; without both it is exact.

    In distributions for which it matters.
    """
    pair = merge_drafters(
        *(
            LoadedDrafter(Bigrams(), jnp.broadcast_to(jnp.log(jnp.array(probabilities)), (3, 3)))
            for probabilities in ([0.02, 0.58, 0.40], second)
        )
    )
    target = Tabular(3), jnp.log(jnp.array([0.2, 0.1, 0.7]))
    check = check_drafter(broken(pair, noises, merge), target, ROWS // 2, prompt=[0])
    assert check.passed == exact, check
    assert exact or check.chi2 > 1.5 * check.threshold


@pytest.mark.parametrize("form", ["eagle3", *slow("mtp_3")])
def test_a_head_follows_what_another_drafted(form, tiny):
    """Its state equals a fresh one after every round, and tokens are those of plain decoding."""
    head = drafter_of(form, tiny, spread=0.3)
    drafter = merge_drafters(Ngram(prompt_lookup_min=1), head)
    assert drafter.drafter.features == head.drafter.features
    assert drafter.drafter.observes
    options = dict(verify="coupled", sampling=mixed(max_new_tokens=8))
    call = make_call(tiny, PROMPTS, drafter=drafter, num_speculative_tokens=2, **options)
    counts, late = [], None
    for state in rounds(call, first_state(call), counts):
        _, wanted = fresh(call, state, 0)
        _, got = observed(call, state)[0]
        assert_alike(state, got, wanted)
        if late is not None and state.active.any():
            with pytest.raises(AssertionError):
                assert_alike(state, got.replace(outputs=late.outputs), wanted)
        late = got
    counts = columns(counts)
    assert counts.accepted.max() > 1
    assert counts.drafted.max() > 2
    plain = decode(tiny, PROMPTS, **options).token_ids
    for row, tokens in enumerate(plain):
        start = len(PROMPTS[row])
        assert state.tokens[row, start : start + len(tokens)].tolist() == tokens


def test_by_name(tiny):
    drafter = specjax.make_drafter("ngram|early_exit", tiny, num_matches=2, exit_layer=2)
    assert drafter.name == "ngram|early_exit"
    shorter = specjax.make_drafter("ngram|early_exit", tiny, num_speculative_tokens=3)
    assert shorter.drafter.num_nodes == 6


def test_merged_drafters_take_turns():
    """In each row the first tree with any node."""
    both = merge_drafters(Ngram(prompt_lookup_min=3), says(9, 3))
    drafter = take_turns(Ngram(num_speculative_tokens=2, num_matches=2), both)
    assert drafter.name == "ngram+ngram|says 9"
    context = context_of([[1, 2, 4, 1, 2, 3, 1, 2], [5, 6, 8], [7, 7, 7]], [3, 3, 0])
    turns, params = drafter

    @jax.jit
    def propose():
        state = turns.init(params, 3, 16)
        return turns.propose(params, state, context, silence, turns.full_limits()).draft

    draft = propose()
    assert draft.valid.sum(axis=1).tolist() == [4, 3, 0]
    assert draft.tokens[0, :4].tolist() == [3, 4, 1, 1]
    assert draft.topology.row_parents[0, :4].tolist() == [0, 0, 1, 2]
    assert draft.tokens[1, :3].tolist() == [9, 9, 9]
    assert draft.topology.row_parents[1, :3].tolist() == [0, 1, 2]


def test_drafters_that_take_turns_are_not_merged():
    with pytest.raises(InputError, match=r"drafter='ngram\+says 1': drafters that take turns"):
        merge_drafters(take_turns(Ngram(), says(1, 2)), says(2, 2))
