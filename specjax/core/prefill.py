"""Prefill: running prompts into caches, in chunks of a few fixed sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax.core.cache import KVCache, commit
from specjax.core.language_model import LanguageModel

Follow = Callable[[Any, KVCache, Int[Array, ""], Int[Array, "B"], dict[str, Array], int], Any]
"""A function (carry, cache, first, count, features, T) -> carry, called after a chunk of T tokens.

`cache` already holds the chunk's tokens, `count` [B] per row, at positions from `first` on;
`features` are arrays [B, T, D] by name.
"""


def prefill(
    model: LanguageModel,
    params: Any,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    chunks: tuple[int, ...],
    features: tuple[str, ...] = (),
    follow: Follow | None = None,
    carry: Any = None,
    begin: Int[Array, ""] | int = 0,
    end: Int[Array, ""] | int | None = None,
) -> tuple[KVCache, Any]:
    """Run each row's tokens from `begin` to `end`; return the extended cache, and the carry.

    The cache holds the tokens before `begin`. Row b has `lengths[b]` tokens, and commits nothing
    beyond them; `end` is by default the longest length. Each pass covers [B, chunk] tokens without
    logits. The chunk sizes `chunks` are descending: the first is used while it fits into the rest,
    then the next, and `end` is rounded up to a multiple of the last. After each pass `follow`
    updates `carry` with the chunk's `features`, which are then discarded.
    """
    batch, available = tokens.shape
    # Padded so that the last chunk fits: a slice that extends past the end would be shifted.
    padded = jnp.pad(tokens, ((0, 0), (0, chunks[-1])))

    def advance(state: tuple, chunk: int) -> tuple:
        first, cache, carry = state
        step = jnp.arange(chunk)
        causal = jnp.tril(jnp.ones((1, chunk, chunk), bool))
        slots = jnp.broadcast_to(step, (batch, chunk))
        result = model.extend(
            params,
            lax.dynamic_slice(padded, (0, first), (batch, chunk)),
            jnp.broadcast_to(first + step, (batch, chunk)),
            cache,
            model.make_window(batch, chunk),
            0,
            causal,
            features=features,
            logits=False,
        )
        count = jnp.clip(lengths - first, 0, chunk)
        cache = commit(cache, result.window, slots, count)
        if follow is not None:
            carry = follow(carry, cache, first, count, result.features, chunk)
        return first + chunk, cache, carry

    longest = jnp.minimum(lengths.max(), available)
    if end is not None:
        longest = jnp.minimum(longest, end)
    state = (jnp.int32(begin), cache, carry)
    for chunk in chunks:
        # A chunk of the last size runs even if it is not full.
        needed = 1 if chunk == chunks[-1] else chunk
        state = lax.while_loop(
            lambda state, needed=needed: state[0] + needed <= longest,
            functools.partial(advance, chunk=chunk),
            state,
        )
    return state[1:]
