"""Times alternative implementations of attention over the cache, each alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from accelerator.rows import Cell
from accelerator.sizes import ITEMSIZE, Size, cached_bytes
from accelerator.synthetic import key, normal, random_cache
from specjax.models.config import DecoderConfig
from specjax.models.kernels.attention_kernel import attend_cache_kernel
from specjax.models.layers.attention import (
    Partial,
    attend,
    attend_cache,
    attend_whole_cache,
    cached_blocks,
    group_queries,
    merge,
    ungroup,
)
from specjax.tuning import costs

VARIANTS = ("blocks", "whole", "kernel", "library_xla", "library_cudnn")
"""The decoder's three, and `jax.nn.dot_product_attention` by XLA and by cuDNN.

The library needs keys as [B, S, G, C], one array per layer; other layouts would be copied.
"""


def variants(platform: str) -> tuple[str, ...]:
    """The variants that a platform supports."""
    return tuple(
        name for name in VARIANTS if platform == "gpu" or name not in ("kernel", "library_cudnn")
    )


def attention_pass(
    size: Size, config: DecoderConfig, cell: Cell, copy_bandwidth: float
) -> dict[str, float | int]:
    """Seconds of one variant, bytes read, and the difference of its result from that of `blocks`.

    Raises NotImplementedError where this JAX does not have the variant, and whatever a kernel
    library raises for shapes and devices that it does not support.
    """
    expected, result = (
        jax.jit(attention(variant))(0, *arguments(size, config, cell, variant))
        for variant in ("blocks", cell["variant"])
    )
    difference = jnp.abs(result.astype(jnp.float32) - expected.astype(jnp.float32)).max()
    once = attention(cell["variant"])
    seconds = costs.loop_seconds(once, *arguments(size, config, cell, cell["variant"]))
    tokens = cell["batch"] * cell["context"]
    num_bytes = cached_bytes(config, tokens, ITEMSIZE[size.dtype], cell["layers"])
    return {
        "seconds": seconds,
        "bytes": num_bytes,
        "bandwidth_utilisation": num_bytes / seconds / copy_bandwidth,
        "max_difference": float(difference),
    }


def attention(variant: str) -> Callable[..., jax.Array]:
    """`once(turn, query [B, T, H, C], window, cache) -> query` through the layers of a cache.

    The window is one layer's keys and values [B, G, T, C], seen causally. The cache is a `KVCache`,
    or for the library's variants (keys, values, length) with lists of [B, S, G, C].
    """

    def once(_: Any, query: jax.Array, window: tuple[jax.Array, jax.Array], cache: Any) -> Any:
        tokens, kv_heads = query.shape[1], window[0].shape[1]
        repeats = query.shape[2] // kv_heads
        causal = jnp.tril(jnp.ones((tokens, tokens), bool))
        seen = jnp.repeat(causal, repeats, axis=0)[None, None]
        own = variant in ("blocks", "whole", "kernel")
        for layer in range(cache.k.shape[0] if own else len(cache[0])):
            grouped = group_queries(query, kv_heads)
            start = attend(grouped, *window, seen)
            if variant == "blocks":
                mixed = attend_cache(grouped, cache, layer, start, cached_blocks(cache))
            elif variant == "whole":
                mixed = attend_whole_cache(grouped, cache, layer, start)
            elif variant == "kernel":
                mixed = attend_cache_kernel(grouped, cache, layer, start)
            else:
                keys, values, length = cache
                found = _library_partial(
                    query, keys[layer], values[layer], length, variant.removeprefix("library_")
                )
                mixed = merge(start, found)
            query = query + ungroup(mixed.weighted / mixed.denominator, tokens).astype(query.dtype)
        return query

    return once


def _library_partial(
    query: jax.Array, keys: jax.Array, values: jax.Array, length: jax.Array, implementation: str
) -> Partial:
    """The library's attention as a `Partial`: peak is its log-sum-exp, the denominator 1."""
    if "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters:
        raise NotImplementedError("dot_product_attention of this JAX returns no log-sum-exp")
    mixed, residual = jax.nn.dot_product_attention(
        query,
        keys,
        values,
        key_value_seq_lengths=length,
        implementation=implementation,
        return_residual=True,
    )
    batch, tokens, heads, _ = query.shape
    groups = keys.shape[2]

    def grouped(x: jax.Array) -> jax.Array:
        split = x.reshape(batch, tokens, groups, heads // groups, -1)
        split = split.transpose(0, 2, 1, 3, 4).reshape(batch, groups, -1, x.shape[-1])
        return split.astype(jnp.float32)

    peak = grouped(residual[..., None])
    return Partial(peak, jnp.ones_like(peak), grouped(mixed))


def arguments(size: Size, config: DecoderConfig, cell: Cell, variant: str) -> tuple:
    """(query, window, cache), the same numbers for every variant."""
    batch, tokens, dtype = cell["batch"], cell["tokens"], jnp.dtype(size.dtype)
    head = config.head_dim
    query = normal(key(3), (batch, tokens, config.num_heads, head), dtype)
    shape = (batch, config.num_kv_heads, tokens, head)
    window = tuple(normal(key(number), shape, dtype) for number in (4, 5))
    fewer = replace(config, num_layers=cell["layers"])
    cache = random_cache(fewer, dtype, batch, size.capacity(cell["context"]), cell["context"])
    if not variant.startswith("library"):
        return query, window, cache
    keys, values = ([*jnp.swapaxes(part, 2, 3)] for part in (cache.k, cache.v))
    return query, window, (keys, values, cache.length)
