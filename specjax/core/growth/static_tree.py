"""Drafting of fixed trees level by level, as in EAGLE-1 (Li et al. 2401.15077) and Medusa."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.core.drafter import Context, Noise
from specjax.core.growth.level import Level, Step, draw_children, likeliest_probability
from specjax.trees import Draft, RankedTree


class _LevelShape(NamedTuple):
    """The nodes with children at one depth of a tree, and their children.

    `nodes` index the root and all nodes in the order in which they are drawn, level by level, and
    `parents` index `nodes` of the previous level. `start` is the first of their slots in the
    drafter's window, and `visible` the slots that each attends to. Each child has a parent, as an
    index into `nodes`, and a rank among the candidates after its parent.
    """

    nodes: Int[np.ndarray, "T"]
    parents: Int[np.ndarray, "T"]
    start: int
    visible: Bool[np.ndarray, "T W"]
    child_parents: Int[np.ndarray, "N"]
    child_ranks: Int[np.ndarray, "N"]

    def parents_in(self, after: Shaped[Array, "B #T _"]) -> Int[np.ndarray, "N"]:
        """Return each child's parent, an index in an array of one entry per node or for all."""
        return self.child_parents if after.shape[1] > 1 else np.zeros_like(self.child_parents)

    def level(self, depth: int, tokens: Int[Array, "B drawn"]) -> Level:
        """Return these nodes as a level; `tokens` are those of all nodes drawn so far."""
        return Level(
            depth,
            tokens[:, self.nodes],
            jnp.broadcast_to(jnp.asarray(self.parents), (len(tokens), len(self.parents))),
            self.start,
            jnp.asarray(self.visible)[None],
        )


def level_sizes(tree: RankedTree) -> tuple[int, ...]:
    """Return the number of tokens run at each depth: the root, and the nodes with children."""
    inner = sorted({0, *tree.topology.parents})
    return tuple(np.bincount(tree.topology.depths[inner]).tolist())


def draft_static_tree(
    tree: RankedTree,
    logits: Float[Array, "B 1 Vd"],
    step: Step,
    carry: Any,
    context: Context,
    noise: Noise,
    *,
    sampled: bool = True,
    p_min: float = 0.0,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> tuple[Draft, Any]:
    """Draft the tokens of a tree, and return the draft and the last carry.

    Tokens are drawn without replacement if `sampled`, else the most likely ones. `logits` follow
    the root, and `step` (a `level.Step`), starting from `carry`, returns those of further levels.
    Nodes beyond a row's limit are invalid, as are those after a token whose most likely successor
    has a probability below `p_min`. If the logits cover only part of the vocabulary, `draft_ids`
    are its token ids.
    """
    batch = context.length.shape[0]
    tokens: list[Int[Array, "B nodes"]] = [context.token_at(context.length - 1)[:, None]]
    valid: list[Bool[Array, "B nodes"]] = [jnp.ones((batch, 1), bool)]
    rows: list[Int[Array, "B nodes"]] = []
    distributions: list[Float[Array, "B #T V"]] = []
    num_rows = 0
    drawn_as = _level_order(tree)
    for depth, shape in enumerate(_level_shapes(tree, drawn_as)):
        if depth:
            logits, carry = step(shape.level(depth, jnp.concatenate(tokens, axis=1)), carry)
        count = int(shape.child_ranks.max()) + 1
        slots = shape.start + np.arange(len(shape.nodes))
        children = draw_children(
            logits, count, context, noise, depth, slots, sampled=sampled, draft_ids=draft_ids
        )
        drawn_after = shape.parents_in(children.tokens)
        exists = children.exists[:, drawn_after, shape.child_ranks]
        exists &= (depth < context.limit)[:, None]
        if p_min > 0:
            exists &= (likeliest_probability(logits) >= p_min)[:, shape.parents_in(logits)]
        parent_valid = jnp.concatenate(valid, axis=1)[:, shape.nodes[shape.child_parents]]
        tokens.append(children.tokens[:, drawn_after, shape.child_ranks])
        valid.append(exists & parent_valid)
        if children.logq is None:
            rows.append(jnp.full(exists.shape, -1))
            continue
        drawn_from = num_rows + shape.parents_in(children.logq)
        rows.append(jnp.where(children.sampled[:, None], drawn_from, -1))
        distributions.append(children.logq)
        num_rows += children.logq.shape[1]

    def in_order(levels: list[Shaped[Array, "B _"]]) -> Shaped[Array, "B N"]:
        return jnp.concatenate(levels, axis=1)[:, drawn_as[1:] - 1]

    draft = Draft(
        tokens=in_order(tokens[1:]),
        valid=in_order(valid[1:]),
        logq_row=in_order(rows).astype(jnp.int32),
        logq=jnp.concatenate(distributions, axis=1) if distributions else None,
        topology=tree.topology,
    )
    return draft, carry


def run_order(tree: RankedTree) -> Int[np.ndarray, "W"]:
    """Return the slots of the root and nodes in the order that they run: by depth, then leaves."""
    drawn_as, inner = _level_order(tree), {0, *tree.topology.parents}
    return np.array(
        sorted(range(len(drawn_as)), key=lambda slot: (slot not in inner, drawn_as[slot]))
    )


def leaf_level(tree: RankedTree, draft: Draft) -> Level:
    """Return the leaves of a drafted tree as a level, after all other nodes in the window."""
    order, start = run_order(tree), sum(level_sizes(tree))
    leaves = order[start:]
    tokens = draft.tokens[:, leaves - 1]
    visible = jnp.asarray(tree.topology.ancestors[np.ix_(leaves, order)])
    depths = tree.topology.depths[leaves]
    return Level(depths, tokens, jnp.zeros_like(tokens), start, visible[None])


def _level_order(tree: RankedTree) -> Int[np.ndarray, "W"]:
    """Return the rank of each slot, the root's included, in the order of depths."""
    depths = tree.topology.depths
    order = np.empty(len(depths), np.int32)
    order[np.argsort(depths, kind="stable")] = np.arange(len(depths))
    return order


def _level_shapes(tree: RankedTree, drawn_as: Int[np.ndarray, "W"]) -> list[_LevelShape]:
    """Return the shapes of the levels that have children, from the root down.

    `drawn_as` is the result of `_level_order`.
    """
    topology, ranks = tree.topology, np.array(tree.ranks, np.int32)
    parents = np.array((0, *topology.parents), np.int32)
    inner = np.array(sorted({0, *topology.parents}, key=lambda slot: drawn_as[slot]), np.int32)
    shapes, start = [], 0
    before = np.zeros(1, np.int32)
    for depth in range(tree.depth):
        # Slots of the draft, in ascending order.
        slots = inner[topology.depths[inner] == depth]
        children = 1 + np.flatnonzero(np.isin(parents[1:], slots))
        shapes.append(
            _LevelShape(
                drawn_as[slots],
                np.searchsorted(before, parents[slots]).astype(np.int32),
                start,
                topology.ancestors[np.ix_(slots, inner)],
                np.searchsorted(slots, parents[children]).astype(np.int32),
                ranks[children - 1],
            )
        )
        start += len(slots)
        before = slots
    return shapes
