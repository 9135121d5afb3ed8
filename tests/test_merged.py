"""Drafters that draft together: one tree of what all of them say, and who is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import (
    random_distribution,
)
from test_drafters import context_of, silence
from test_turn_taking import lookup, model, says
from tiny_models import bigrams

import specjax
from specjax import sampling
from specjax.drafters import merge_drafters, take_turns
from specjax.errors import InputError
from specjax.methods.ngram import Ngram

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
