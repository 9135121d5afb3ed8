"""Prefill: runs prompts into caches in chunks, with one compiled shape for all prompt lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit, put
from specjax.models.interface import LanguageModel

Features = dict[str, Float[Array, "B S D"]]


def prefill(
    model: LanguageModel,
    params: Any,
    tokens: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    chunk: int,
    features: tuple[str, ...] = (),
) -> tuple[KVCache, Features]:
    """The empty cache filled with each row's first `lengths` tokens, and the requested features.

    Runs ceil(max length / chunk) forwards of [B, chunk] tokens without logits; a row that has
    finished commits nothing more. Features are [B, S, D] with S the cache's capacity, zero where
    not computed.
    """
    batch, available = tokens.shape
    step = jnp.arange(chunk)
    # Padded so that the last chunk fits: a slice that reaches past the end would be shifted.
    padded = jnp.pad(tokens, ((0, 0), (0, chunk)))
    causal = jnp.tril(jnp.ones((1, chunk, chunk), bool))
    slots = jnp.broadcast_to(step, (batch, chunk))

    def forward(first: Int[Array, ""], cache: KVCache) -> Any:
        part = lax.dynamic_slice(padded, (0, first), (batch, chunk))
        positions = jnp.broadcast_to(first + step, (batch, chunk))
        return model.extend(
            params,
            part,
            positions,
            cache,
            model.make_window(batch, chunk),
            0,
            causal,
            features=features,
            logits=False,
        )

    def advance(carry: tuple) -> tuple:
        first, cache, kept = carry
        result = forward(first, cache)
        kept = {
            name: put(kept[name], (first + step)[None, :], value)
            for name, value in result.features.items()
        }
        count = jnp.clip(lengths - first, 0, chunk)
        return first + chunk, commit(cache, result.window, slots, count), kept

    shapes = jax.eval_shape(forward, jnp.int32(0), cache).features
    kept = {
        name: jnp.zeros((batch, cache.capacity, *shape.shape[2:]), shape.dtype)
        for name, shape in shapes.items()
    }
    longest = jnp.minimum(lengths.max(), available)
    _, cache, kept = lax.while_loop(
        lambda carry: carry[0] < longest, advance, (jnp.int32(0), cache, kept)
    )
    return cache, kept
