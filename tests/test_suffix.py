"""Suffix decoding: matches of any length, counted continuations, and a state that follows."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import caught_up, changed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafters import context_of, silence
from tiny_models import bigrams

from specjax.core.drafter import Accepted
from specjax.drafters import TokenRecycling, take_turns
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.methods.lookup import Lookup
from specjax.methods.suffix import Suffix
from specjax.sampling import Coupled
from specjax.testing.drafter_check import decode as decode_rows
from specjax.testing.drafter_check import make_plan
from specjax.trees import DynamicTree, RankedTree

LONGEST_ROW = 48
LOOSE = dict(suffix_decoding_max_spec_factor=2.0, suffix_decoding_max_spec_offset=1.0)
TREE = dict(tree=DynamicTree(4, 3, 8), suffix_decoding_max_spec_factor=4.0)


def matched_by_hand(ids):
    """The text that ends at each position and at the end of the row, by its length."""
    lengths = np.zeros(len(ids), int)
    for end in range(len(ids) - 1):
        while lengths[end] <= end and ids[end - lengths[end]] == ids[-1 - lengths[end]]:
            lengths[end] += 1
    return lengths


def drafted_by_hand(ids, drafter, limit):
    """The most frequent continuation of the longest matches, position by position."""
    lengths = matched_by_hand(ids)
    longest = lengths.max()
    if longest == 0:
        return []
    depth = drafter.suffix_decoding_max_tree_depth
    factor, offset = (
        drafter.suffix_decoding_max_spec_factor,
        drafter.suffix_decoding_max_spec_offset,
    )
    allowed = max(
        min(int(factor * size + offset), depth - size)
        for size in range(1, min(longest, depth - 1) + 1)
    )
    copies = [(ids[end + 1 :] * limit)[:limit] for end in np.flatnonzero(lengths == longest)]
    copies, draft, probability = copies[::-1][:32], [], 1.0
    for step in range(min(limit, allowed)):
        # Of equal counts the first token, and so the latest match, comes first.
        token, count = Counter(copy[step] for copy in copies).most_common(1)[0]
        probability *= count / len(copies)
        if probability < drafter.suffix_decoding_min_token_prob:
            break
        draft.append(token)
        copies = [copy for copy in copies if copy[step] == token]
    return draft


def tree_by_hand(ids, drafter, limit):
    """The paths by count, of equal counts the shorter, then that of the latest match."""
    lengths = matched_by_hand(ids)
    longest = lengths.max()
    if longest == 0:
        return {}
    copies = [(ids[end + 1 :] * limit)[:limit] for end in np.flatnonzero(lengths == longest)]
    copies = copies[::-1][:32]
    counts = Counter()
    for depth in range(1, limit + 1):
        counts.update(tuple(copy[:depth]) for copy in copies)
    latest = [copies.index(next(c for c in copies if (*c[: len(p)],) == p)) for p in counts]
    order = sorted(zip(counts, latest, strict=True), key=lambda e: (-counts[e[0]], len(e[0]), e[1]))
    kept, children = {}, Counter()
    for path, _ in order:
        is_reached = len(path) == 1 or path[:-1] in kept
        likely = counts[path] / len(copies) >= drafter.suffix_decoding_min_token_prob
        if is_reached and likely and children[path[:-1]] < drafter.tree.topk:
            children[path[:-1]] += 1
            kept[path] = counts[path]
    allowed = drafter.lengths[min(longest, len(drafter.lengths) - 1)]
    return dict(list(kept.items())[:allowed])


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, state, context):
    return drafter.propose((), state, context, silence)[0]


@functools.partial(jax.jit, static_argnums=1)
def observed_in_chunks(context, size):
    """The state of rows whose tokens but the first were observed `size` at a time."""
    drafter, lengths = Suffix(), context.length

    def observe(number, state):
        first = 1 + number * size
        known = context.replace(length=jnp.minimum(lengths, first + size))
        count = jnp.clip(lengths - first, 0, size)
        tokens = known.tokens_from(known.length - count, size)
        return drafter.observe((), state, known, Accepted(tokens, count, {}))

    empty = drafter.init((), *context.tokens.shape)
    return jax.lax.fori_loop(0, -(-LONGEST_ROW // size), observe, empty)


def context_of_rows(rows):
    """A context of one width, whatever the rows; the last row is of no interest."""
    return context_of([*rows, [0] * LONGEST_ROW], [8] * (len(rows) + 1))


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST_ROW), min_size=3, max_size=3
    ),
    options=st.sampled_from(
        [
            {},
            LOOSE,
            LOOSE | dict(suffix_decoding_min_token_prob=0.4001),
            LOOSE | dict(suffix_decoding_max_tree_depth=5, suffix_decoding_min_token_prob=0.0),
            dict(suffix_decoding_max_spec_offset=-2.0),
        ]
    ),
    size=st.sampled_from([1, 4, 64]),
)
def test_matches_and_drafts_as_by_hand(rows, options, size):
    drafter = Suffix(**options)
    context = context_of_rows(rows)
    state = observed_in_chunks(context, size)
    draft = propose(drafter, state, context)
    for row, ids in enumerate(rows):
        matched = np.asarray(state[row])
        assert matched[: len(ids)].tolist() == matched_by_hand(ids).tolist()
        assert not matched[len(ids) :].any()
        count = int(draft.valid[row].sum())
        assert draft.tokens[row, :count].tolist() == drafted_by_hand(ids, drafter, 8)
    assert draft.logq is None
    assert (draft.logq_row == -1).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST_ROW), min_size=3, max_size=3
    ),
    options=st.sampled_from(
        [
            LOOSE | dict(tree=DynamicTree(8, 4, 12)),
            LOOSE | dict(tree=DynamicTree(2, 4, 12), suffix_decoding_min_token_prob=0.0),
            dict(tree=DynamicTree(8, 4, 5), suffix_decoding_max_spec_factor=9.0),
        ]
    ),
)
def test_trees_as_by_hand(rows, options):
    drafter = Suffix(**options)
    context = context_of_rows(rows)
    draft = propose(drafter, observed_in_chunks(context, 64), context)
    parents = np.asarray(draft.topology.row_parents)
    for row, ids in enumerate(rows):
        paths = [()]
        for node in np.flatnonzero(draft.valid[row]):
            paths.append((*paths[parents[row, node]], int(draft.tokens[row, node])))
        assert paths[1:] == list(tree_by_hand(ids, drafter, 4))
    assert (draft.logq_row == -1).all()


def test_drafts_follow_the_longest_match_and_the_counts():
    drafter = Suffix(**LOOSE, suffix_decoding_min_token_prob=0.5)
    rows = [
        [7, 1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3],  # not the later, shorter match
        [1, 2, 1, 3, 1, 2, 4, 1],  # 2 followed twice; then 1 and 4, the latter the later
        [5, 5],  # goes on in the copy
        [5, 6, 8],
    ]
    context = context_of_rows(rows).replace(limit=jnp.array([8, 8, 2, 8, 0]))
    draft = propose(drafter, observed_in_chunks(context, 64), context)
    count = draft.valid.sum(axis=1).tolist()
    assert count == [8, 1, 2, 0, 0]
    assert draft.tokens[0].tolist() == [4, 5, 9, 2, 3, 6, 7, 1]
    assert draft.tokens[1, :1].tolist() == [2]
    assert draft.tokens[2, :2].tolist() == [5, 5]


def test_lengths_by_match():
    assert Suffix(suffix_decoding_max_tree_depth=8).lengths == (0, 1, 2, 3, 4, 4, 4, 4)
    assert Suffix(num_speculative_tokens=3).lengths == (0, 1, 2, *[3] * 21)
    ten_of_seven = dict(suffix_decoding_max_spec_factor=0.7, suffix_decoding_max_tree_depth=64)
    assert Suffix(**ten_of_seven).lengths[10] == 7
    assert Suffix(suffix_decoding_max_spec_offset=-3.0).lengths[:6] == (0, 0, 0, 0, 1, 2)


@pytest.fixture(scope="module")
def target():
    return bigrams(5)


def assert_state_is_fresh(loaded, target):
    """After rounds of the real loop, the matches are those of each row's text."""
    model, logits = target
    request = SamplingParams(temperature=1.0)
    drafter, params = take_turns(loaded)
    plan = make_plan(model, drafter, 4, verify=Coupled(), request=request, capacity=40)
    params = (logits, params)
    state, rounds = decode_rows(plan, params, [3, 1, 3], request, np.arange(8), 0, 7)
    (matched,) = caught_up(plan, params, state)
    for row, length in enumerate(state.length.tolist()):
        ids = np.asarray(state.tokens[row, :length]).tolist()
        assert matched[row, :length].tolist() == matched_by_hand(ids).tolist()
    assert np.asarray(rounds.accepted).max() > 1


def test_the_state_equals_a_fresh_one(target):
    assert_state_is_fresh(Suffix(**LOOSE), target)


def matches_itself(real, params, state, context, accepted):
    """A match may end at the very token whose successor is drafted."""
    return real(params, state, context.replace(length=context.length + 1), accepted)


def misses_a_token(real, params, state, context, accepted):
    shorter = accepted.replace(count=jnp.maximum(accepted.count - 1, 0))
    missed = accepted.count - shorter.count
    return real(params, state, context.replace(length=context.length - missed), shorter)


def forgets(real, params, state, context, accepted):
    return real(params, jnp.zeros_like(state), context, accepted)


@pytest.mark.parametrize("broken", [matches_itself, *slow(misses_a_token, forgets)])
def test_broken_states_are_found(broken, target):
    with pytest.raises(AssertionError, match="At index"):
        assert_state_is_fresh(changed(Suffix(**LOOSE), observe=broken), target)


def test_lookup_is_the_two_in_one_tree():
    lookup = Lookup(61)
    assert lookup.parts == (Suffix(suffix_decoding_max_spec_factor=4.0), TokenRecycling(61))
    assert (lookup.num_speculative_tokens, lookup.num_nodes) == (8, 40)
    assert dataclasses.replace(lookup, num_speculative_tokens=3).parts[0].num_nodes == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"suffix_decoding_max_tree_depth": 1},
            "drafter.suffix_decoding_max_tree_depth=1: use a whole number from 2 to 2048",
        ),
        (
            {"suffix_decoding_max_spec_factor": -1.0},
            "drafter.suffix_decoding_max_spec_factor=-1.0: use a number from 0 to 1024",
        ),
        (
            {"suffix_decoding_min_token_prob": 1.5},
            "drafter.suffix_decoding_min_token_prob=1.5: use a number from 0 to 1",
        ),
        ({"tree": RankedTree(((0,), (1,)))}, "tree.kind=static: suffix counts its trees anew; use"),
        (
            {"tree": DynamicTree(4, 3, 8), "num_speculative_tokens": 4},
            "num_speculative_tokens=4: the tree has 3 levels",
        ),
        ({"tree": DynamicTree(64, 1, 64)}, "tree.num_nodes=64: 32 matches of 1 tokens have at"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(InputError, match=said):
        Suffix(**options)
