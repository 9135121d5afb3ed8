"""Attention over the committed cache as one GPU kernel, written in Pallas for Triton.

Each program handles one row, one key/value head and one range of cache slots, reads only the
committed keys of that range, and writes a partial softmax. The partial results are merged by their
log-sum-exp (flash decoding: Dao et al. 2023, https://pytorch.org/blog/flash-decoding/). Unlike
XLA's products, which first copy a layer's slice, it reads the cache in place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache
from specjax.cached_entries import Entries, Int8Entries, powers_of_two
from specjax.models.layers.attention import Partial, merge, on_each_device

_STEP = 64
"""Keys that a program reads at a time."""
_MOST_TOKENS = 64
_FEWEST_QUERIES, _MOST_QUERIES = 16, 64
"""Limits of a program: the smallest matrix product of the hardware, and what fits into it."""


def takes(tokens: int, width: int) -> bool:
    """Return whether the kernel supports a pass over `tokens` tokens with heads of width `width`.

    Triton's blocks are powers of two. A prefill's partial sums would be larger than the cache.
    """
    return tokens <= _MOST_TOKENS and width == pl.next_power_of_2(width) >= _FEWEST_QUERIES


def attend_cache_kernel(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    layer: int,
    start: Partial,
    split: bool = False,
) -> Partial:
    """Return `start` merged with attention over one layer's committed keys.

    Blocks without committed keys are skipped. On a mesh the heads are sharded over `model` if
    `split`, otherwise replicated.
    """
    attend = functools.partial(_attend, layer=layer)
    return merge(start, on_each_device(attend, query, cache, split))


def _attend(
    query: Float[Array, "B G X C"],
    keys: Entries,
    values: Entries,
    length: Int[Array, "B"],
    *,
    layer: int,
) -> Partial:
    batch, kv_heads, queries, width = query.shape
    capacity = keys.shape[3]
    range_size = next((size for size in (512, 256, 128) if capacity % size == 0), capacity)
    tile_rows = min(max(_FEWEST_QUERIES, pl.next_power_of_2(queries)), _MOST_QUERIES)
    query_tiles = pl.cdiv(queries, tile_rows)
    padded = jnp.pad(query, ((0, 0), (0, 0), (0, query_tiles * tile_rows - queries), (0, 0)))
    num_ranges = pl.cdiv(capacity, range_size)

    # A grid has three axes at most: heads and tiles of queries share one.
    def result(size: int) -> Any:
        return pl.BlockSpec(
            (None, None, None, tile_rows, size),
            lambda b, h, s: (b, h // query_tiles, s, h % query_tiles, 0),
        )

    def cached(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, range_size, array.shape[-1]),
            lambda b, h, s: (layer, b, h // query_tiles, s, 0),
        )

    stored = jax.tree.map(cached, (keys, values))
    shape = (batch, kv_heads, num_ranges, query_tiles * tile_rows)
    output_shapes = [jax.ShapeDtypeStruct((*shape, size), jnp.float32) for size in (1, 1, width)]

    def run(interpret: bool, *operands: Any) -> Any:
        return pl.pallas_call(
            functools.partial(_program, range_size=range_size),
            grid=(batch, kv_heads * query_tiles, num_ranges),
            in_specs=[
                pl.BlockSpec((1,), lambda b, h, s: (b,)),
                pl.BlockSpec(
                    (None, None, tile_rows, width),
                    lambda b, h, s: (b, h // query_tiles, h % query_tiles, 0),
                ),
                *stored,
            ],
            out_specs=[result(1), result(1), result(width)],
            out_shape=output_shapes,
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="attend_cache",
        )(*operands)

    outputs = lax.platform_dependent(
        length,
        padded,
        keys,
        values,
        cpu=functools.partial(run, True),
        default=functools.partial(run, False),
    )
    peak, denominator, weighted = (output[:, :, :, :queries] for output in outputs)
    highest = peak.max(axis=2)
    anchor = jnp.where(jnp.isneginf(highest), 0.0, highest)
    scale = jnp.exp(peak - anchor[:, :, None])
    return Partial(highest, (denominator * scale).sum(axis=2), (weighted * scale).sum(axis=2))


def _program(
    length_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    peak_ref: Any,
    denominator_ref: Any,
    weighted_ref: Any,
    *,
    range_size: int,
) -> None:
    rows, width = query_ref.shape
    step = min(_STEP, range_size)
    filled = jnp.clip(length_ref[0] - pl.program_id(2) * range_size, 0, range_size)
    query = query_ref[...]

    def add(step_index: jax.Array, total: tuple) -> tuple:
        peak, denominator, weighted = total
        slots = pl.ds(step_index * step, step)
        key, key_powers = _load(key_ref, slots, query.dtype)
        scores = plgpu.dot(query, key, trans_b=True, allow_tf32=False)
        scores = scores.astype(jnp.float32) * key_powers
        visible = step_index * step + lax.broadcasted_iota(jnp.int32, (rows, step), 1) < filled
        scores = jnp.where(visible, scores, -jnp.inf)
        # Every step has a visible key, so that the peak is finite from the first one on.
        higher = jnp.maximum(peak, scores.max(axis=1))
        weights = jnp.exp(scores - higher[:, None])
        scale = jnp.exp(peak - higher)
        value, value_powers = _load(value_ref, slots, query.dtype)
        weighted_rows = (weights * value_powers).astype(value.dtype)
        mixed = plgpu.dot(weighted_rows, value, allow_tf32=False)
        return (
            higher,
            denominator * scale + weights.sum(axis=1),
            weighted * scale[:, None] + mixed.astype(jnp.float32),
        )

    nothing = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    peak, denominator, weighted = lax.fori_loop(0, pl.cdiv(filled, step), add, nothing)
    peak_ref[...] = peak[:, None]
    denominator_ref[...] = denominator[:, None]
    weighted_ref[...] = weighted


def _load(ref: Any, slots: Any, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Return some slots' keys or values, and the numbers [1, Y] that they are times."""
    if not isinstance(ref, Int8Entries):
        return ref[slots, :].astype(dtype), 1.0
    return ref.integers[slots, :].astype(dtype), powers_of_two(ref.exponents[slots, 0])[None]
