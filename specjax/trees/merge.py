"""Merging of drafts with a common root into one tree, on the device.

The drafts come from several drafters (SpecInfer, 2305.09781, section 3), or are several
continuations by one drafter. Nodes that they share are verified once as far as exactness allows: a
sampled node must be tested even if a sibling has the same token, while a deterministic node is
redundant if an earlier sibling has its token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax.errors import InputError
from specjax.trees.draft import Draft, check_draft, usable
from specjax.trees.topology import AnyTopology, DynamicTopology, Topology


def merge(*drafts: Draft) -> Draft:
    """Return the drafts as one tree under their common root, without duplicates.

    The result has as many nodes (N) as all drafts together, some of them invalid;
    `merge_duplicates` states its order. Raises InputError as `side_by_side` does.
    """
    return merge_duplicates(side_by_side(*drafts))


def side_by_side(*drafts: Draft) -> Draft:
    """Return the drafts as one tree under their common root, with duplicates, draft after draft.

    Raises InputError for drafts whose arrays do not agree, within a draft (`check_draft`) or with
    those of the other drafts, and without drafts.
    """
    if not drafts:
        raise InputError("merge: there are no drafts; pass one or more")
    rows, vocab_size = None, None
    for number, draft in enumerate(drafts):
        check_draft(draft, f"merge: draft {number} has", rows=rows, vocab_size=vocab_size)
        rows = draft.tokens.shape[0]
        vocab_size = vocab_size if draft.logq is None else draft.logq.shape[2]
    if len(drafts) == 1:
        return drafts[0]
    drafts = tuple(map(usable, drafts))  # before their rows of `logq` are numbered anew
    logq_rows, distributions, offset = [], [], 0
    for draft in drafts:
        logq_rows.append(jnp.where(draft.logq_row < 0, -1, draft.logq_row + offset))
        if draft.logq is not None:
            distributions.append(draft.logq)
            offset += draft.logq.shape[1]
    # Without `steps`: only chains have them, and drafting a tree counts as one run.
    return Draft(
        tokens=jnp.concatenate([draft.tokens for draft in drafts], axis=1),
        valid=jnp.concatenate([draft.valid for draft in drafts], axis=1),
        logq_row=jnp.concatenate(logq_rows, axis=1),
        logq=jnp.concatenate(distributions, axis=1) if distributions else None,
        topology=_one_root([draft.topology for draft in drafts], drafts[0].tokens.shape[0]),
        drafted_by=None
        if any(draft.drafted_by is None for draft in drafts)
        else jnp.concatenate([draft.drafted_by for draft in drafts], axis=1),
    )


def merge_duplicates(draft: Draft) -> Draft:
    """Return the draft without deterministic nodes that repeat the token of an earlier sibling.

    Siblings are tested in node order. The new order is: sampled nodes in the order drawn, then
    deterministic nodes. A sampled node is always kept. A deterministic node is removed if an
    earlier sibling has its token; its children move to that sibling, where they may be duplicates
    in turn. Kept nodes come first, sorted by depth, so that a row with few of them fits a narrow
    width; removed nodes become invalid and come last. Within a depth, sampled nodes come first:
    whether a node is among the first n then depends only on tokens above its depth, and truncating
    a tree to n nodes adds no bias.

    Sampled nodes whose parents are deterministic duplicates must not share a row of `logq`.
    """
    parents = jnp.broadcast_to(draft.topology.row_parents, draft.tokens.shape)
    depths = jnp.broadcast_to(draft.topology.row_depths[:, 1:], draft.tokens.shape)
    valid = draft.topology.close(draft.valid)
    drawn = draft.logq_row >= 0
    count = parents.shape[1]
    slots = jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]
    test_order = jnp.where(drawn, 0, count) + slots
    same_token = draft.tokens[:, :, None] == draft.tokens[:, None, :]
    same_token &= valid[:, :, None] & valid[:, None, :]

    def level(depth: Int[Array, ""], stands_for: Int[Array, "B W"]) -> Int[Array, "B W"]:
        """Update, for nodes at `depth`, the slot of the node that each duplicate is merged into."""
        kept_parents = jnp.take_along_axis(stands_for, parents, axis=1)
        duplicates = same_token & (kept_parents[:, :, None] == kept_parents[:, None, :])
        first = 1 + jnp.argmin(jnp.where(duplicates, test_order[:, None, :], 3 * count), axis=2)
        replaceable = (depths == depth) & valid & ~drawn
        return stands_for.at[:, 1:].set(jnp.where(replaceable, first, stands_for[:, 1:]))

    unmerged = jnp.broadcast_to(jnp.arange(count + 1, dtype=jnp.int32), (len(parents), count + 1))
    stands_for = lax.fori_loop(1, draft.topology.depth + 1, level, unmerged)
    kept = valid & (stands_for[:, 1:] == slots)
    rank = jnp.where(kept, 2 * depths + ~drawn, 2 * count + 2)
    order = jnp.argsort(rank, axis=1, stable=True)
    new_slots = jnp.pad(1 + jnp.argsort(order, axis=1), ((0, 0), (1, 0)))
    kept_parents = jnp.take_along_axis(stands_for, parents, axis=1)
    new_parents = jnp.where(kept, jnp.take_along_axis(new_slots, kept_parents, axis=1), 0)
    new_parents = new_parents.astype(jnp.int32)

    def in_new_order(nodes: Array) -> Array:
        return jnp.take_along_axis(nodes, order, axis=1)

    return Draft(
        tokens=in_new_order(draft.tokens),
        valid=in_new_order(kept),
        logq_row=in_new_order(draft.logq_row),
        logq=draft.logq,
        topology=DynamicTopology(in_new_order(new_parents), draft.topology.depth),
        drafted_by=None if draft.drafted_by is None else in_new_order(draft.drafted_by),
    )


def _one_root(topologies: Sequence[AnyTopology], batch: int) -> AnyTopology:
    """Return a topology with the nodes of several trees under one root, tree after tree.

    It is static if all of `topologies` are, and otherwise has `batch` rows.
    """
    offsets = itertools.accumulate((tree.num_nodes for tree in topologies[:-1]), initial=0)
    pairs = list(zip(topologies, offsets, strict=True))
    if all(isinstance(tree, Topology) for tree in topologies):
        return Topology(
            tuple(parent and parent + offset for tree, offset in pairs for parent in tree.parents)
        )
    parents = [
        jnp.broadcast_to(
            jnp.where(tree.row_parents == 0, 0, tree.row_parents + offset), (batch, tree.num_nodes)
        )
        for tree, offset in pairs
    ]
    return DynamicTopology(
        jnp.concatenate(parents, axis=1).astype(jnp.int32), max(tree.depth for tree in topologies)
    )
