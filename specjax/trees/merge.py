"""Drafts under one root, merged into one tree on the device.

Several drafters propose for one round (SpecInfer, 2305.09781, section 3), or one proposes several
continuations. What two of them have in common is verified once, as far as the output's distribution
allows: a node that was drawn is a test of its own, also where a sibling has its token, while a
deterministic node adds nothing to a sibling before it with the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax.trees.draft import Draft
from specjax.trees.topology import AnyTopology, DynamicTopology, Topology


def merge(*drafts: Draft) -> Draft:
    """The drafts as one tree under their common root, without duplicates (`merge_duplicates`).

    N is the sum of theirs.
    """
    return merge_duplicates(side_by_side(*drafts))


def side_by_side(*drafts: Draft) -> Draft:
    """The drafts under their common root, their nodes one draft after another."""
    if len(drafts) == 1:
        return drafts[0]
    logq_rows, distributions, offset = [], [], 0
    for draft in drafts:
        logq_rows.append(jnp.where(draft.logq_row < 0, -1, draft.logq_row + offset))
        if draft.logq is not None:
            distributions.append(draft.logq)
            offset += draft.logq.shape[1]
    return Draft(
        tokens=jnp.concatenate([draft.tokens for draft in drafts], axis=1),
        valid=jnp.concatenate([draft.valid for draft in drafts], axis=1),
        logq_row=jnp.concatenate(logq_rows, axis=1),
        logq=jnp.concatenate(distributions, axis=1) if distributions else None,
        topology=_one_root([draft.topology for draft in drafts], drafts[0].tokens.shape[0]),
    )


def merge_duplicates(draft: Draft) -> Draft:
    """The draft without deterministic nodes that say what an earlier sibling says.

    Siblings are tested in the order of their nodes, which becomes: those that were drawn, in the
    order drawn, then the deterministic ones. A drawn node always stays. A deterministic one goes
    where a sibling before it has its token, and its children become that sibling's, where they may
    be duplicates in turn. The nodes that are left come first, sorted by depth, so that a row that
    has few runs at a narrow width; the others are not valid. Of one depth the drawn ones come
    first: whether one is among the first n nodes depends on tokens above its depth alone, and a
    tree may be truncated to n without a bias.

    Drawn nodes whose parents are deterministic duplicates must not share a row of `logq`.
    """
    parents = jnp.broadcast_to(draft.topology.row_parents, draft.tokens.shape)
    depths = jnp.broadcast_to(draft.topology.row_depths[:, 1:], draft.tokens.shape)
    valid = draft.topology.close(draft.valid)
    drawn = draft.logq_row >= 0
    count = parents.shape[1]
    own = jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]
    turn = jnp.where(drawn, 0, count) + own
    agree = draft.tokens[:, :, None] == draft.tokens[:, None, :]
    agree &= valid[:, :, None] & valid[:, None, :]

    def level(depth: Int[Array, ""], stands_for: Int[Array, "B W"]) -> Int[Array, "B W"]:
        """For each slot the one that is left of its duplicates, known down to `depth`."""
        above = jnp.take_along_axis(stands_for, parents, axis=1)
        same = agree & (above[:, :, None] == above[:, None, :])
        first = 1 + jnp.argmin(jnp.where(same, turn[:, None, :], 3 * count), axis=2)
        found = (depths == depth) & valid & ~drawn
        return stands_for.at[:, 1:].set(jnp.where(found, first, stands_for[:, 1:]))

    itself = jnp.broadcast_to(jnp.arange(count + 1, dtype=jnp.int32), (len(parents), count + 1))
    stands_for = lax.fori_loop(1, draft.topology.depth + 1, level, itself)
    kept = valid & (stands_for[:, 1:] == own)
    rank = jnp.where(kept, 2 * depths + ~drawn, 2 * count + 2)
    order = jnp.argsort(rank, axis=1, stable=True)
    new_slots = jnp.pad(1 + jnp.argsort(order, axis=1), ((0, 0), (1, 0)))
    above = jnp.take_along_axis(stands_for, parents, axis=1)
    above = jnp.where(kept, jnp.take_along_axis(new_slots, above, axis=1), 0).astype(jnp.int32)

    def sorted_(nodes: Array) -> Array:
        return jnp.take_along_axis(nodes, order, axis=1)

    return Draft(
        tokens=sorted_(draft.tokens),
        valid=sorted_(kept),
        logq_row=sorted_(draft.logq_row),
        logq=draft.logq,
        topology=DynamicTopology(sorted_(above), draft.topology.depth),
    )


def _one_root(topologies: Sequence[AnyTopology], batch: int) -> AnyTopology:
    """Trees under one root, their nodes one tree after another; static if all of them are."""
    offsets = [sum(one.num_nodes for one in topologies[:i]) for i in range(len(topologies))]
    pairs = list(zip(topologies, offsets, strict=True))
    if all(isinstance(one, Topology) for one in topologies):
        return Topology(
            tuple(parent and parent + offset for one, offset in pairs for parent in one.parents)
        )
    parents = [
        jnp.broadcast_to(
            jnp.where(one.row_parents == 0, 0, one.row_parents + offset), (batch, one.num_nodes)
        )
        for one, offset in pairs
    ]
    return DynamicTopology(
        jnp.concatenate(parents, axis=1).astype(jnp.int32), max(one.depth for one in topologies)
    )
