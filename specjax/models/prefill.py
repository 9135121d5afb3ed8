"""Prefill: runs prompts into caches in chunks, with one compiled shape for all prompt lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax.cache import KVCache, commit
from specjax.models.interface import LanguageModel

Follow = Callable[[Any, KVCache, Int[Array, ""], Int[Array, "B"], dict[str, Array]], Any]
"""(carry, cache, first, count, features [B, T, D]) -> carry: what follows a chunk that was read.

`cache` holds the chunk's `count` tokens already, which stand at positions `first` and after.
"""


def prefill(
    model: LanguageModel,
    params: Any,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    chunk: int,
    features: tuple[str, ...] = (),
    follow: Follow | None = None,
    carry: Any = None,
    begin: Int[Array, ""] | int = 0,
    end: Int[Array, ""] | int | None = None,
) -> tuple[KVCache, Any]:
    """The cache with each row's tokens from `begin` to `end` too, and what `follow` carried.

    The cache holds those before `begin`. Of each row the first `lengths` tokens count, all of them
    where there is no `end`. Runs ceil(tokens / chunk) forwards of [B, chunk] tokens without logits,
    so `end` is rounded up to whole chunks; a row that has finished commits nothing more. After each
    forward `follow` sees the chunk's named features, which are kept no longer than that.
    """
    batch, available = tokens.shape
    step = jnp.arange(chunk)
    # Padded so that the last chunk fits: a slice that reaches past the end would be shifted.
    padded = jnp.pad(tokens, ((0, 0), (0, chunk)))
    causal = jnp.tril(jnp.ones((1, chunk, chunk), bool))
    slots = jnp.broadcast_to(step, (batch, chunk))

    def advance(state: tuple) -> tuple:
        first, cache, carry = state
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
            carry = follow(carry, cache, first, count, result.features)
        return first + chunk, cache, carry

    longest = jnp.minimum(lengths.max(), available)
    if end is not None:
        longest = jnp.minimum(longest, end)
    _, cache, carry = lax.while_loop(
        lambda state: state[0] < longest, advance, (jnp.int32(begin), cache, carry)
    )
    return cache, carry
