"""Drafts merged into one tree: what is left, in which order, against a plain brute force."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import trees
from specjax.trees import Draft, DynamicTopology, Topology, chain, merge, merge_duplicates

NODES, DEPTH = 7, 4
MERGED = jax.jit(merge_duplicates)


@st.composite
def rows(draw):
    """A tree of few tokens, so that many siblings are duplicates; parents before children."""
    parents, depths = [], [0]
    for node in range(NODES):
        above = [slot for slot in range(node + 1) if depths[slot] < DEPTH]
        # Chains, too: the latest slots are as likely as the root.
        parents.append(draw(st.sampled_from([above[0], *above[-2:]])))
        depths.append(depths[parents[-1]] + 1)
    tokens = draw(st.lists(st.integers(0, 1), min_size=NODES, max_size=NODES))
    drawn = draw(st.lists(st.booleans(), min_size=NODES, max_size=NODES))
    kept = st.sampled_from([True, True, True, False])
    return parents, tokens, drawn, draw(st.lists(kept, min_size=NODES, max_size=NODES))


def draft_of(batch):
    parents, tokens, drawn, valid = (jnp.asarray(part) for part in zip(*batch, strict=True))
    node = jnp.arange(NODES)[None, :]
    return Draft(
        tokens=tokens,
        valid=valid,
        # Any number below 0 says that a node was not drawn: it tells the nodes apart.
        logq_row=jnp.where(drawn, node, -1 - node),
        logq=jnp.zeros((len(batch), NODES, 2)),
        topology=DynamicTopology(parents, DEPTH),
    )


def as_nested(draft, row):
    """A draft's valid nodes as a tree of (token, logq_row, children), siblings in their order."""
    slots = {0: []}
    parents = np.broadcast_to(draft.topology.row_parents, draft.tokens.shape)[row]
    for node in range(draft.tokens.shape[1]):
        if draft.valid[row, node] and int(parents[node]) in slots:
            slots[node + 1] = []
            entry = (int(draft.tokens[row, node]), int(draft.logq_row[row, node]))
            slots[int(parents[node])].append((*entry, slots[node + 1]))
    return slots[0]


def by_hand(siblings):
    """The rule, sibling by sibling: drawn ones first, and each deterministic token once."""
    left = []
    for token, row, below in sorted(siblings, key=lambda node: (node[1] < 0, abs(node[1]))):
        same = [other for other in left if other[0] == token]
        if row < 0 and same:
            same[0][2].extend(below)
        else:
            left.append((token, row, list(below)))
    return [(*node[:2], by_hand(node[2])) for node in left]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=8, max_size=8))
def test_merged_as_by_hand(batch):
    draft = draft_of(batch)
    merged = MERGED(draft)
    before, after = jax.device_get((draft, merged))
    for row in range(len(batch)):
        assert as_nested(after, row) == by_hand(as_nested(before, row))
    # What is left comes first, and parents before children.
    assert (np.diff(after.valid.astype(int), axis=1) <= 0).all()
    assert (after.topology.row_parents <= np.arange(NODES)).all()
    assert (merged.topology.close(merged.valid) == merged.valid).all()


def test_a_drawn_duplicate_stays_and_a_deterministic_one_goes():
    logq = jnp.zeros((1, 2, 9))
    drawn = chain(jnp.array([[5, 6]]), jnp.array([2]), logq)
    copied = chain(jnp.array([[5, 6, 7]]), jnp.array([3]))
    merged = jax.jit(merge)(copied, drawn, drawn)
    assert merged.topology.depth == 3
    assert merged.valid.tolist() == [[True] * 5 + [False] * 2]
    assert merged.tokens[0, :5].tolist() == [5, 5, 6, 6, 7]
    assert merged.topology.row_parents[0, :5].tolist() == [0, 0, 1, 2, 3]
    assert merged.logq_row[0, :5].tolist() == [0, 2, 1, 3, -1]
    assert merged.logq.shape == (1, 4, 9)


def test_chains_with_a_common_beginning():
    first, second, third = (
        chain(jnp.array([tokens]), jnp.array([count]))
        for tokens, count in (([1, 2, 3], 3), ([1, 2, 4], 3), ([8, 2, 3], 1))
    )
    merged = jax.jit(merge)(first, second, third)
    assert merged.logq is None
    assert merged.valid.sum() == 5
    assert merged.tokens[0, :5].tolist() == [1, 8, 2, 3, 4]
    assert merged.topology.row_parents[0, :5].tolist() == [0, 0, 1, 3, 3]


def test_trees_of_both_kinds_stand_side_by_side():
    branches = Topology((0, 0, 1))
    tokens, valid = jnp.array([[1, 2, 3]]), jnp.ones((1, 3), bool)
    row = jnp.full((1, 3), -1)
    static = Draft(tokens, valid, row, None, branches)
    dynamic = static.replace(topology=DynamicTopology(jnp.array([[0, 1, 1]]), 2))
    assert trees.side_by_side(static, static).topology == Topology((0, 0, 1, 0, 0, 4))
    both = trees.side_by_side(static, dynamic).topology
    assert both.row_parents.tolist() == [[0, 0, 1, 0, 4, 4]]
    assert trees.side_by_side(dynamic) is dynamic
