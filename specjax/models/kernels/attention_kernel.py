"""Attention over cache and window as one GPU kernel, written in Pallas for Triton.

Each program handles one row, one key/value head, a tile of its queries and a share of the committed
keys, which it reads in place; the last share also reads the window. The shares' partial results are
merged by their log-sum-exp (flash decoding: Dao et al. 2023,
https://pytorch.org/blog/flash-decoding/). There are enough shares to keep all processors busy, and
they divide the committed keys, not the capacity. The layer index is an operand, so that all layers
run the same code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.core.cached_entries import Entries, Int8Entries, powers_of_two
from specjax.models.layers.attention import (
    Partial,
    blocks_to_read,
    cache_operands,
    on_each_device,
)

_STEP = 64
"""The number of keys that a program reads at a time."""
_PROGRAMS = 264
"""The number of programs that keeps a GPU busy: two per multiprocessor of an H100."""
_SMALLEST_SHARE = 128
"""The least number of keys, of a full cache, for which a program pays."""
_FEWEST_QUERIES = 16
"""The number of rows in the hardware's smallest matrix product."""
_MOST_NUMBERS = 64 * 128
"""The most elements in a tile of queries, so that it fits into registers."""


def takes(width: int) -> bool:
    """Return whether the kernel supports heads of this width, which must be a power of two."""
    return width == pl.next_power_of_2(width) >= _FEWEST_QUERIES


def attend_window_and_cache(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    window: Window,
    layer: Int[Array, ""] | int,
    seen: Bool[Array, "#B 1 X W"],
    oldest: Int[Array, "B X"] | None = None,
    softcap: float | None = None,
    split: bool = False,
    sinks: int = 0,
) -> Partial:
    """Return attention over one layer's committed keys and the keys of the window that are `seen`.

    With `oldest`, each query attends to committed keys from that position on and to the first
    `sinks` keys; blocks between them, and the oldest position of a tile, are skipped. `softcap`
    limits scores to c tanh(score/c). On a mesh the heads are sharded over `model` if `split`,
    otherwise replicated.
    """
    seen = jnp.broadcast_to(seen[:, 0], (len(query), *seen.shape[2:])).astype(jnp.int8)
    operands = {
        **cache_operands(query, cache, layer, oldest),
        "window_keys": ("cache", window.k),
        "window_values": ("cache", window.v),
        "seen": ("rows", seen),
    }
    attend_own = functools.partial(_attend, softcap=softcap, sinks=sinks)
    return on_each_device(attend_own, operands, split)


class _Operands(NamedTuple):
    """The operands of the kernel: arrays for its caller, references inside the program."""

    layer: Any
    length: Any
    query: Any
    keys: Any
    values: Any
    window_keys: Any
    window_values: Any
    seen: Any
    oldest: Any
    pages: Any


def _attend(
    query: Float[Array, "B G X C"],
    keys: Entries,
    values: Entries,
    window_keys: Float[Array, "L B G W C"],
    window_values: Float[Array, "L B G W C"],
    length: Int[Array, "B"],
    seen: Int[Array, "B X W"],
    layer: Int[Array, ""],
    oldest: Int[Array, "B X"] | None = None,
    pages: Int[Array, "B N"] | None = None,
    *,
    softcap: float | None,
    sinks: int,
) -> Partial:
    batch, heads, queries, width = query.shape
    rows = min(
        max(_FEWEST_QUERIES, pl.next_power_of_2(queries)),
        max(_FEWEST_QUERIES, min(64, _MOST_NUMBERS // width)),
    )
    tiles = pl.cdiv(queries, rows)
    capacity = keys.shape[3] * (1 if pages is None else pages.shape[1])
    shares = _num_shares(batch * heads * tiles, capacity)

    # A grid has three axes at most: heads and tiles of queries share one.
    def of_head(array: jax.Array) -> pl.BlockSpec:
        shape = (None, None, *array.shape[2:])
        return pl.BlockSpec(shape, lambda b, h, s: (b, h // tiles, 0, 0))

    def of_row(array: jax.Array) -> pl.BlockSpec:
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec((None, *array.shape[1:]), lambda b, h, s: (b, *zeros))

    def of_layers(array: jax.Array) -> pl.BlockSpec:
        shape = (array.shape[0], None, None, *array.shape[3:])
        return pl.BlockSpec(shape, lambda b, h, s: (0, b, h // tiles, 0, 0))

    def of_pool(array: jax.Array) -> pl.BlockSpec:
        shape = (*array.shape[:2], None, *array.shape[3:])
        return pl.BlockSpec(shape, lambda b, h, s: (0, 0, h // tiles, 0, 0))

    def result(size: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, rows, size), lambda b, h, s: (b, h // tiles, s, h % tiles, 0)
        )

    operands = _Operands(
        layer[None], length, query, keys, values, window_keys, window_values, seen, oldest, pages
    )
    specs = _Operands(
        pl.BlockSpec((1,), lambda b, h, s: (0,)),
        pl.BlockSpec((1,), lambda b, h, s: (b,)),
        of_head(query),
        *jax.tree.map(of_layers if pages is None else of_pool, (keys, values)),
        *map(of_layers, (window_keys, window_values)),
        of_row(seen),
        None if oldest is None else of_row(oldest),
        None if pages is None else of_row(pages),
    )
    shape = (batch, heads, shares, tiles * rows)
    outputs = [jax.ShapeDtypeStruct((*shape, size), jnp.float32) for size in (1, 1, width)]
    program = functools.partial(
        _program,
        tiles=tiles,
        shares=shares,
        step=math.gcd(keys.shape[3], _STEP),
        softcap=softcap,
        sinks=sinks,
    )

    peak, denominator, weighted = _call(
        program,
        operands,
        grid=(batch, heads * tiles, shares),
        in_specs=[specs],
        out_specs=[result(1), result(1), result(width)],
        out_shape=outputs,
        name="attend_window_and_cache",
    )
    if shares == 1:
        return Partial(*(array[:, :, 0, :queries] for array in (peak, denominator, weighted)))

    def of_query(size: int | None) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, shares, None, size), lambda b, h, x: (b, h, 0, x, 0))

    merged = _call(
        _merge,
        (peak, denominator, weighted),
        grid=(batch, heads, queries),
        in_specs=[(of_query(None), of_query(None), of_query(width))],
        out_specs=pl.BlockSpec((None, None, None, width), lambda b, h, x: (b, h, x, 0)),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        name="merge_shares",
    )
    # XLA leaves it out where nothing else is merged with the result.
    log_sum = jax.nn.logsumexp(peak, axis=2, b=denominator)[:, :, :queries]
    return Partial(log_sum, jnp.ones_like(log_sum), merged)


def _call(program: Callable[..., None], operands: Any, name: str, **arguments: Any) -> Any:
    """Return the outputs of a Pallas kernel; on a CPU, as in tests, Pallas interprets it."""

    def run(interpret: bool, operands: Any) -> Any:
        parameters = plgpu.CompilerParams(num_warps=4, num_stages=2)
        call = pl.pallas_call(
            program, compiler_params=parameters, interpret=interpret, name=name, **arguments
        )
        return call(operands)

    return lax.platform_dependent(
        operands, cpu=functools.partial(run, True), default=functools.partial(run, False)
    )


def _num_shares(programs: int, capacity: int) -> int:
    """Return the number of shares, a power of two, into which a row's committed keys are divided.

    `programs` is the number of programs per share.
    """
    most = max(1, min(_PROGRAMS // programs, capacity // _SMALLEST_SHARE))
    return 1 << (most.bit_length() - 1)


def _merge(refs: tuple[Any, Any, Any], merged_ref: Any) -> None:
    """Write one query's mean of the values, weighted over the keys of all shares, to `merged_ref`.

    `refs` are the peaks, denominators and weighted sums of the shares.
    """
    peak, denominator, weighted = (ref[...] for ref in refs)
    scale = jnp.exp(peak - _finite(peak.max(axis=0)))
    total = (weighted * scale[:, None]).sum(axis=0)
    mean = total / (denominator * scale).sum(axis=0)
    merged_ref[...] = mean.astype(merged_ref.dtype)


def _finite(peak: jax.Array) -> jax.Array:
    """Return the number to subtract from scores: `peak`, or 0 if there is no visible key."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _program(
    refs: _Operands,
    peak_ref: Any,
    denominator_ref: Any,
    weighted_ref: Any,
    *,
    tiles: int,
    shares: int,
    step: int,
    softcap: float | None,
    sinks: int,
) -> None:
    rows, width = weighted_ref.shape
    queries, slots = refs.seen.shape
    tile, share = pl.program_id(1) % tiles, pl.program_id(2)
    # Rows beyond the last query read it again, since Triton has no partial blocks.
    row = jnp.minimum(tile * rows + lax.iota(jnp.int32, rows), queries - 1)
    layer, length = refs.layer[0], refs.length[0]
    query = refs.query[row, :]

    def add(total: tuple, key: tuple, value: tuple, visible: jax.Array) -> tuple:
        peak, denominator, weighted = total
        scores = plgpu.dot(query, key[0], trans_b=True, allow_tf32=False)
        scores = scores.astype(jnp.float32) * key[1]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, -jnp.inf)
        higher = jnp.maximum(peak, scores.max(axis=1))
        anchor = _finite(higher)
        weights, scale = jnp.exp(scores - anchor[:, None]), jnp.exp(peak - anchor)
        weighted_rows = (weights * value[1]).astype(value[0].dtype)
        mixed = plgpu.dot(weighted_rows, value[0], allow_tf32=False)
        return (
            higher,
            denominator * scale + weights.sum(axis=1),
            weighted * scale[:, None] + mixed.astype(jnp.float32),
        )

    oldest = None if refs.oldest is None else refs.oldest[row]

    def add_committed(index: jax.Array, total: tuple) -> tuple:
        block = block_at(index)
        where = (layer, pl.ds(block * step, step))
        if refs.pages is not None:
            steps = refs.keys.shape[2] // step
            where = (layer, refs.pages[block // steps], pl.ds(block % steps * step, step))
        key, value = (_load(ref, where, query.dtype) for ref in (refs.keys, refs.values))
        if refs.pages is not None:
            # A page may hold numbers of an earlier row that are not finite.
            committed = block * step + lax.iota(jnp.int32, step) < length
            value = (jnp.where(committed[:, None], value[0], 0).astype(query.dtype), value[1])
        position = block * step + lax.broadcasted_iota(jnp.int32, (rows, step), 1)
        visible = position < length
        if oldest is not None:
            visible &= (position >= oldest[:, None]) | (position < sinks)
        return add(total, key, value, visible)

    window_step = max(_FEWEST_QUERIES, min(_STEP, pl.next_power_of_2(slots)))

    def add_window(block: jax.Array, total: tuple) -> tuple:
        slot = block * window_step + lax.iota(jnp.int32, window_step)
        inside = jnp.minimum(slot, slots - 1)
        key, value = (
            _load(ref, (layer, inside), query.dtype)
            for ref in (refs.window_keys, refs.window_values)
        )
        visible = refs.seen[row[:, None], inside[None, :]] != 0
        return add(total, key, value, visible & (slot < slots)[None, :])

    blocks = pl.cdiv(length, step)
    first, block_at = blocks_to_read(oldest, sinks, blocks, step)
    each = pl.cdiv(jnp.maximum(blocks - first, 0), shares)
    begin = first + share * each
    total = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    total = lax.fori_loop(begin, jnp.minimum(begin + each, blocks), add_committed, total)
    window_blocks = (share == shares - 1).astype(jnp.int32) * pl.cdiv(slots, window_step)
    peak, denominator, weighted = lax.fori_loop(0, window_blocks, add_window, total)
    peak_ref[...] = peak[:, None]
    denominator_ref[...] = denominator[:, None]
    weighted_ref[...] = weighted


def _load(ref: Any, where: tuple, dtype: jnp.dtype) -> tuple[Any, Any]:
    """Return keys or values at a layer and some slots, and factors [1, Y] to multiply them with.

    `ref` is the reference to the arrays of a cache or window, `where` the index of the slots.
    """
    if not isinstance(ref, Int8Entries):
        return ref[(*where, slice(None))].astype(dtype), 1.0
    powers = powers_of_two(ref.exponents[(*where, 0)])[None]
    return ref.integers[(*where, slice(None))].astype(dtype), powers
