"""The best tree of each round, by the draft's own probabilities (EAGLE-2, Li et al. 2406.16858)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from specjax.drafters.base import Context
from specjax.drafters.growth.level import Level, Step, likeliest_probability, top
from specjax.trees import Draft, DynamicTopology, DynamicTree


class _Candidates(NamedTuple):
    """Candidates of one level: their values and tokens.

    `parents` are indices among the candidates of all levels, and -1 for the root.
    """

    value: Float[Array, "B candidates"]
    tokens: Int[Array, "B candidates"]
    parents: Int[Array, "B candidates"]


def level_sizes(tree: DynamicTree) -> tuple[int, ...]:
    """How many tokens are run at each depth, from the root on: none of the deepest candidates."""
    return (1, *[tree.topk] * (tree.depth - 1))


def draft_dynamic_tree(
    tree: DynamicTree,
    logits: Float[Array, "B 1 Vd"],
    step: Step,
    carry: Any,
    context: Context,
    *,
    p_min: float = 0.0,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> tuple[Draft, Any]:
    """The tree of the likeliest candidates, which are never drawn, and the carry.

    The value of a candidate is its probability and that of all before it, by the draft's logits
    without a temperature; `logits` are those after the root. Nodes are sorted by value, of equal
    ones the shallower first, so that parents precede children and the first n nodes are the best
    tree of n nodes. Candidates deeper than a row's limit do not count, nor do those after a token
    whose likeliest successor has a probability below `p_min`.
    """
    batch, topk, slots = context.length.shape[0], tree.topk, sum(level_sizes(tree))

    def candidates(logits: Float[Array, "B T Vd"]) -> tuple[Array, Array]:
        """The best after each token: their log-probabilities, and they."""
        scores, ids = top(logits, topk)
        logp = scores - logsumexp(logits, axis=-1, keepdims=True)
        logp = jnp.where(scores > -jnp.inf, logp, -jnp.inf).astype(jnp.float32)
        if p_min > 0:
            logp = jnp.where((likeliest_probability(logits) >= p_min)[..., None], logp, -jnp.inf)
        return logp, ids if draft_ids is None else draft_ids[ids]

    logp, tokens = candidates(logits)
    # `best` are the candidates of the latest level that are run, `parents` those before them.
    found = [_Candidates(logp[:, 0], tokens[:, 0], jnp.full((batch, topk), -1))]
    best = jnp.broadcast_to(jnp.arange(topk), (batch, topk))
    parents = jnp.zeros((batch, topk), jnp.int32)
    visible = (jnp.arange(slots) == 0)[None, None, :]
    for depth in range(1, tree.depth):
        start = 1 + (depth - 1) * topk
        own = jnp.arange(slots)[None, :] == start + jnp.arange(topk)[:, None]
        visible = jnp.broadcast_to(visible, (batch, *visible.shape[1:]))
        visible = jnp.take_along_axis(visible, parents[:, :, None], axis=1) | own[None]
        level = Level(
            depth,
            jnp.take_along_axis(found[-1].tokens, best, axis=1),
            parents,
            start,
            visible,
        )
        logits, carry = step(level, carry)
        logp, tokens = candidates(logits)
        above = jnp.take_along_axis(found[-1].value, best, axis=1)
        # The index of the latest level's first candidate among all.
        first = sum(one.value.shape[1] for one in found[:-1])
        shape = (batch, topk, topk)
        found.append(
            _Candidates(
                (above[:, :, None] + logp).reshape(batch, -1),
                jnp.broadcast_to(tokens, shape).reshape(batch, -1),
                jnp.repeat(first + best, topk, axis=1),
            )
        )
        _, best = lax.top_k(found[-1].value, topk)
        parents = best // topk
    return _best_nodes(tree, found, context), carry


def _best_nodes(tree: DynamicTree, levels: list[_Candidates], context: Context) -> Draft:
    """The `num_nodes` best of all candidates within each row's limit."""
    depths = np.repeat(np.arange(len(levels)) + 1, [one.value.shape[1] for one in levels])
    value, tokens, parents = (jnp.concatenate(part, axis=1) for part in zip(*levels, strict=True))
    value = jnp.where(depths[None, :] <= context.limit[:, None], value, -jnp.inf)
    # Of equal ones the first is taken first, and a parent's index is below its children's.
    value, nodes = lax.top_k(value, tree.num_nodes)
    parents = jnp.take_along_axis(parents, nodes, axis=1)
    is_parent = parents[:, :, None] == nodes[:, None, :]
    slots = jnp.where(is_parent.any(axis=2), 1 + jnp.argmax(is_parent, axis=2), 0)
    return Draft(
        tokens=jnp.take_along_axis(tokens, nodes, axis=1),
        valid=value > -jnp.inf,
        logq_row=jnp.full(nodes.shape, -1),
        logq=None,
        topology=DynamicTopology(slots.astype(jnp.int32), tree.depth),
    )
