"""Drafting of the best tree in each round, by draft probabilities (EAGLE-2, 2406.16858)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from specjax.core.drafter import Context
from specjax.core.growth.level import Level, Step, likeliest_probability, top
from specjax.trees import Draft, DynamicTopology, DynamicTree


class Candidates(NamedTuple):
    """The candidates of one level: their values, tokens and parents.

    The values rank the candidates of all levels; no value exceeds that of the parent, and -inf
    means that there is no candidate. `parents` are indices among the candidates of all levels, or
    -1 for the root.
    """

    value: Float[Array, "B candidates"]
    tokens: Int[Array, "B candidates"]
    parents: Int[Array, "B candidates"]


def level_sizes(tree: DynamicTree) -> tuple[int, ...]:
    """Return the number of tokens run at each depth, from the root; the deepest are not run."""
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
    """Draft the tree of the most likely candidates (deterministic); return it and the last carry.

    The value of a candidate is the log-probability of its path under the draft's logits without a
    temperature. `logits` follow the root, and `step` (a `level.Step`), starting from `carry`,
    returns those of further levels. Nodes are sorted by value, shallower first at equal values, so
    that parents precede children and the first n nodes are the best tree of n nodes. Candidates
    beyond a row's limit are omitted, as are those after a token whose most likely successor has a
    probability below `p_min`. If the logits cover only part of the vocabulary, `draft_ids` are its
    token ids.
    """
    batch, topk, slots = context.length.shape[0], tree.topk, sum(level_sizes(tree))
    likeliest_after = functools.partial(
        _likeliest_after, topk=topk, p_min=p_min, draft_ids=draft_ids
    )
    logp, tokens = likeliest_after(logits)
    levels = [Candidates(logp[:, 0], tokens[:, 0], jnp.full((batch, topk), -1))]
    # `best` are the candidates of the latest level that the drafter runs, and `parents` are their
    # parents, as indices into `best` of the previous level.
    best = jnp.broadcast_to(jnp.arange(topk), (batch, topk))
    parents = jnp.zeros((batch, topk), jnp.int32)
    visible = (jnp.arange(slots) == 0)[None, None, :]
    for depth in range(1, tree.depth):
        start = 1 + (depth - 1) * topk
        itself = jnp.arange(slots)[None, :] == start + jnp.arange(topk)[:, None]
        visible = jnp.broadcast_to(visible, (batch, *visible.shape[1:]))
        visible = jnp.take_along_axis(visible, parents[:, :, None], axis=1) | itself[None]
        level_tokens = jnp.take_along_axis(levels[-1].tokens, best, axis=1)
        logits, carry = step(Level(depth, level_tokens, parents, start, visible), carry)
        logp, tokens = likeliest_after(logits)
        parent_value = jnp.take_along_axis(levels[-1].value, best, axis=1)
        # The index of the latest level's first candidate among all.
        first = sum(level.value.shape[1] for level in levels[:-1])
        levels.append(
            Candidates(
                (parent_value[:, :, None] + logp).reshape(batch, -1),
                jnp.broadcast_to(tokens, (batch, topk, topk)).reshape(batch, -1),
                jnp.repeat(first + best, topk, axis=1),
            )
        )
        _, best = lax.top_k(levels[-1].value, topk)
        parents = best // topk
    return best_nodes(tree, levels, context), carry


def _likeliest_after(
    logits: Float[Array, "B T Vd"], topk: int, p_min: float, draft_ids: Int[Array, "Vd"] | None
) -> tuple[Float[Array, "B T topk"], Int[Array, "B T topk"]]:
    """Return the log-probabilities and ids of the `topk` most likely tokens after each token."""
    scores, ids = top(logits, topk)
    logp = scores - logsumexp(logits, axis=-1, keepdims=True)
    logp = jnp.where(scores > -jnp.inf, logp, -jnp.inf).astype(jnp.float32)
    if p_min > 0:
        logp = jnp.where((likeliest_probability(logits) >= p_min)[..., None], logp, -jnp.inf)
    return logp, ids if draft_ids is None else draft_ids[ids]


def best_nodes(tree: DynamicTree, levels: Sequence[Candidates], context: Context) -> Draft:
    """Return the `num_nodes` best candidates within each row's limit, as a draft.

    `levels` are the candidates of each depth. Nodes are sorted by value; at equal values the
    shallower comes first, then the earlier candidate.
    """
    depths = np.repeat(np.arange(len(levels)) + 1, [level.value.shape[1] for level in levels])
    value, tokens, parents = (
        jnp.concatenate(of_levels, axis=1) for of_levels in zip(*levels, strict=True)
    )
    value = jnp.where(depths[None, :] <= context.limit[:, None], value, -jnp.inf)
    # Among equal values the lower index comes first: a parent's is below its children's.
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
