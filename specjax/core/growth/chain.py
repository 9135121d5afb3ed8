"""Drafting of chains token by token, as long as the drafter is confident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import trees
from specjax.core.causal_mask import causal
from specjax.core.draft_vocabulary import expand
from specjax.core.drafter import Context, Noise
from specjax.core.growth.level import Level, Step, likeliest_probability
from specjax.sampling import argmax
from specjax.trees import Draft

Confidence = Callable[[Int[Array, ""] | int, Int[Array, "B"]], Float[Array, "B"]]
"""A function (depth, previous token) that returns the probability that the next token is accepted.

It must not depend on the next token itself.
"""


def level_sizes(length: int) -> tuple[int, ...]:
    """Return the number of tokens run at each depth of a chain of `length` tokens, root included.

    It is one, except that the last token is not run.
    """
    return (1,) * max(length, 1)


def draft_chain(
    longest: int,
    logits: Float[Array, "B 1 Vd"],
    step: Step,
    carry: Any,
    context: Context,
    noise: Noise,
    *,
    sampled: bool = True,
    p_min: float = 0.0,
    draft_ids: Int[Array, "Vd"] | None = None,
    confidence: Confidence | None = None,
) -> tuple[Draft, Any]:
    """Draft a chain of up to `longest` tokens per row; return it and the last carry.

    Tokens are drawn if `sampled`, else the most likely ones. `logits` follow the root, and `step`
    (a `level.Step`), starting from `carry`, returns the logits after the token of each further
    level. A row stops at its limit, or if the most likely next token has a probability below
    `p_min` or `context.least_confidence`; `confidence`, if given, replaces that probability. This
    is tested before sampling parameters apply and before the token is drawn, so that the draft
    stays exact. The loop ends with its longest row, or at `longest` if the context has
    `full_drafts`. If the logits cover only part of the vocabulary, `draft_ids` are its token ids.
    """
    keeps_logq = sampled and context.needs_logq and longest > 0
    least = jnp.maximum(p_min, context.least_confidence)
    root = context.token_at(context.length - 1)
    slots = len(level_sizes(longest))

    def grow(depth: Int[Array, ""] | int, logits: Float[Array, "B Vd"], chain: _Chain) -> _Chain:
        wanted = (chain.count == depth) & (depth < context.limit)
        if confidence is None:
            wanted &= likeliest_probability(logits) >= least
        else:
            wanted &= confidence(depth, chain.token) >= least
        token, distribution = _choose(
            logits, context, noise, depth, sampled=sampled, draft_ids=draft_ids
        )
        if keeps_logq:
            chain = chain.replace(distributions=_put(chain.distributions, distribution, depth))
        if longest:
            chain = chain.replace(tokens=_put(chain.tokens, token, depth))
        return chain.replace(token=token, count=jnp.where(wanted, depth + 1, chain.count))

    def unfinished(loop: tuple[Array, _Chain]) -> Array:
        depth, chain = loop
        return jnp.any((chain.count == depth) & (depth < context.limit))

    def draft_next(loop: tuple[Array, _Chain]) -> tuple[Array, _Chain]:
        depth, chain = loop
        token = chain.token[:, None]
        visible = causal(depth[None], slots)
        level = Level(depth, token, jnp.zeros_like(token), depth, visible)
        logits, carry = step(level, chain.carry)
        return depth + 1, grow(depth, logits[:, 0], chain.replace(carry=carry))

    vocab = context.target.vocab_size if keeps_logq else None
    chain = grow(0, logits[:, 0], _empty_chain(root, longest, vocab, carry))
    first = jnp.int32(1), chain
    if context.full_drafts:
        depth, chain = lax.fori_loop(1, longest, lambda _, loop: draft_next(loop), first)
    else:
        depth, chain = lax.while_loop(unfinished, draft_next, first)
    draft = trees.chain(chain.tokens, chain.count, chain.distributions)
    return draft.replace(steps=depth - 1), chain.carry


def last_level(draft: Draft, slots: int) -> tuple[Level, Bool[Array, ""]]:
    """Return the last token of each chain as a level, and whether any of them was not run yet.

    `slots` is the size of the window. Rows with fewer tokens than the longest have run all of
    theirs.
    """
    depth = draft.steps + 1
    token, valid = (
        lax.dynamic_slice_in_dim(nodes, draft.steps, 1, axis=1)
        for nodes in (draft.tokens, draft.valid)
    )
    visible = causal(depth[None], slots)
    return Level(depth, token, jnp.zeros_like(token), depth, visible), valid.any()


@struct.dataclass
class _Chain:
    """A chain while it is drafted: each row's latest token, and its number of tokens so far."""

    token: Int[Array, "B"]
    count: Int[Array, "B"]
    tokens: Int[Array, "B K"]
    distributions: Float[Array, "B K V"] | None
    carry: Any


def _empty_chain(root: Int[Array, "B"], longest: int, vocab: int | None, carry: Any) -> _Chain:
    """Return chains without tokens, each after its `root`.

    `vocab` is V if distributions are to be kept, and None otherwise.
    """
    batch = len(root)
    return _Chain(
        token=root,
        count=jnp.zeros(batch, jnp.int32),
        tokens=jnp.zeros((batch, longest), jnp.int32),
        distributions=None if vocab is None else jnp.zeros((batch, longest, vocab)),
        carry=carry,
    )


def _put(into: Array, new: Array, depth: Int[Array, ""] | int) -> Array:
    """Return `into` with `new` written at index `depth` of its second axis."""
    return lax.dynamic_update_slice(into, new[:, None], (0, depth, *[0] * (into.ndim - 2)))


def _choose(
    logits: Float[Array, "B Vd"],
    context: Context,
    noise: Noise,
    depth: Int[Array, ""] | int,
    *,
    sampled: bool,
    draft_ids: Int[Array, "Vd"] | None,
) -> tuple[Int[Array, "B"], Float[Array, "B V"] | None]:
    """Return one token per row, drawn with its distribution, or the most likely one with None."""
    if sampled and context.flags.sampled:
        return context.draw(expand(logits, draft_ids, context.target.vocab_size), noise, depth)
    token = argmax(logits)
    return (token if draft_ids is None else draft_ids[token]), None
