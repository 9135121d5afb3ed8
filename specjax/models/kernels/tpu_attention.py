"""Attention over committed keys as one TPU kernel, written in Pallas for Mosaic.

A TPU core runs the steps of a grid one after the other and reads the operands of the next step
meanwhile. Here a step is a block of one row's committed tokens, which it finds by the row's pages
(Kwon et al. 2023, arXiv:2309.06180), and the number of steps is that of the blocks that the rows
fill: rows of any lengths cost what they hold. A row's blocks are accumulated by an online softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867). The window is left to XLA and merged by
log-sum-exp.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from specjax.core.cache import KVCache
from specjax.core.cached_entries import Entries, powers_of_two
from specjax.models.layers.attention import Partial, cache_operands, merge, on_each_device
from specjax.models.layers.matmul import full_precision

_FEWEST = 64
"""The fewest tokens that are multiplied at a time; a page has a multiple of it."""
_PIECE = 128
"""The tokens that are multiplied at a time, where a page has a multiple of it."""
_BLOCK = 256
"""The tokens of a block, whose pieces are operands of their own: they may be in several pages."""
_MOST_QUERIES = 256
"""The most queries of a head in a tile."""
_MOST_BYTES = 8 << 20
"""The memory of a core for the blocks of all heads that a step handles."""
_MOST_PIECES = 1 << 16
"""The most pieces in the capacity of all rows, since the tables are in the memory for scalars."""
_LANES = 128


def takes(cache: KVCache) -> bool:
    """Return whether the kernel can read this cache."""
    page, rows = cache.k.shape[3], len(cache.length)
    return (
        cache.k.dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
        and page % _FEWEST == 0
        and rows * cache.capacity <= _MOST_PIECES * math.gcd(page, _PIECE)
    )


def attend_committed(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    start: Partial,
    oldest: Int[Array, "B X"] | None = None,
    softcap: float | None = None,
    split: bool = False,
    sinks: int = 0,
) -> Partial:
    """Return `start` merged with attention over one layer's committed keys.

    With `oldest`, each query attends to keys from that position on and to the first `sinks` keys,
    and blocks between them, and the oldest position of a row, are skipped. `softcap` limits scores
    to c tanh(score/c). On a mesh the heads are sharded over `model` if `split`, otherwise
    replicated.
    """
    operands = cache_operands(query, cache, layer, oldest)
    attend_own = functools.partial(_attend, softcap=softcap, sinks=sinks)
    return merge(start, on_each_device(attend_own, operands, split))


class _Scalars(NamedTuple):
    """What says which block a step reads; arrays for the caller, references inside.

    `row` is the row of each step, `begin` each row's first step, and `skipped` the number of its
    blocks that are not read. `pages` are the rows' tables, one after the other.
    """

    layer: Any
    length: Any
    row: Any
    begin: Any
    skipped: Any
    pages: Any

    def block(self, step: Any, sink_blocks: int) -> Any:
        """Return the block of its row that a step reads: those with sinks are not skipped."""
        row = self.row[step]
        index = step - self.begin[row]
        return index + jnp.where(index < sink_blocks, 0, self.skipped[row])


class _Operands(NamedTuple):
    """What a step computes with; arrays for the caller, references inside.

    `keys` and `values` have an item for each piece of a block: an array, or integers and exponents.
    """

    query: Any
    oldest: Any
    keys: Any
    values: Any


def _attend(
    query: Float[Array, "B G X C"],
    keys: Entries,
    values: Entries,
    length: Int[Array, "B"],
    layer: Int[Array, ""],
    oldest: Int[Array, "B X"] | None = None,
    pages: Int[Array, "B N"] | None = None,
    *,
    softcap: float | None,
    sinks: int,
) -> Partial:
    batch, heads, queries, width = query.shape
    # Mosaic has no float16.
    query = query.astype(jnp.promote_types(query.dtype, jnp.bfloat16))
    # A page may hold numbers of an earlier row that are not finite.
    hidden = pages is not None
    if pages is None:
        pages = jnp.arange(batch)[:, None]
    size = math.gcd(keys.shape[3], _PIECE)
    per_page, per_row = keys.shape[3] // size, pages.shape[1]
    pieces = min(_BLOCK // size, per_page * per_row)
    most_blocks = pl.cdiv(per_page * per_row, pieces)
    sink_blocks = pl.cdiv(sinks, pieces * size)
    row, *of_rows, steps = _schedule(length, oldest, pieces * size, most_blocks, sink_blocks)
    tile = min(queries, _MOST_QUERIES)
    group = _heads_at_a_time(heads, tile, width, pieces * size, keys.dtype.itemsize)

    def of_row(h: Any, t: Any, s: Any, scalars: _Scalars) -> tuple[Any, ...]:
        return scalars.row[s], h, t, 0

    def of_queries(h: Any, t: Any, s: Any, scalars: _Scalars) -> tuple[Any, ...]:
        return scalars.row[s], t, 0

    def of_piece(array: jax.Array, piece: int) -> pl.BlockSpec:
        # Exponents have the tokens on their last axis.
        by_token = array.shape[3] > 1
        shape = (size, width) if by_token else (1, size)

        def where(h: Any, t: Any, s: Any, scalars: _Scalars) -> tuple[Any, ...]:
            row = scalars.row[s]
            last = jnp.maximum(_quotient(scalars.length[row] - 1, size), 0)
            index = jnp.minimum(scalars.block(s, sink_blocks) * pieces + piece, last)
            of_row = _quotient(index, per_page)
            # Rows without a token may have no page.
            page = jnp.minimum(scalars.pages[row * per_row + of_row], array.shape[1] - 1)
            layer = 0 if array.shape[0] == 1 else scalars.layer[0]
            index -= of_row * per_page
            return (layer, page, h, *((index, 0) if by_token else (0, index)))

        return pl.BlockSpec((None, None, group, *shape), where)

    def in_pieces(entries: Entries) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the operands of all pieces and their blocks."""
        integers, *exponents = jax.tree.leaves(entries)
        leaves = [integers]
        for array in exponents:
            # Their layout has to change; one layer is less to copy than all.
            of_layer = lax.dynamic_index_in_dim(array, layer, allow_negative_indices=False)
            leaves.append(jnp.swapaxes(of_layer, 3, 4))
        specs = (tuple(of_piece(array, piece) for array in leaves) for piece in range(pieces))
        return (tuple(leaves),) * pieces, tuple(specs)

    (keys, key_specs), (values, value_specs) = in_pieces(keys), in_pieces(values)
    scalars = _Scalars(layer[None], length, row, *of_rows, pages.reshape(-1).astype(jnp.int32))
    operands = _Operands(query, None if oldest is None else oldest[:, :, None], keys, values)
    specs = _Operands(
        pl.BlockSpec((None, group, tile, width), of_row),
        None if oldest is None else pl.BlockSpec((None, tile, 1), of_queries),
        key_specs,
        value_specs,
    )
    program = functools.partial(
        _program, hidden=hidden, softcap=softcap, sinks=sinks, sink_blocks=sink_blocks
    )

    def run(interpret: bool, steps: jax.Array, scalars: _Scalars, operands: _Operands) -> Any:
        of_query = pltpu.VMEM((group, tile, 1), jnp.float32)
        call = pl.pallas_call(
            program,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(heads // group, pl.cdiv(queries, tile), steps),
                in_specs=(specs,),
                out_specs=[pl.BlockSpec((None, group, tile, size), of_row) for size in (width, 1)],
                scratch_shapes=[of_query, of_query],
            ),
            out_shape=[
                jax.ShapeDtypeStruct((batch, heads, queries, size), jnp.float32)
                for size in (width, 1)
            ],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
            name="attend_committed",
        )
        if not interpret:
            # XLA would copy a small cache to the core for each layer, free slots and all layers.
            pin = functools.partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)
            keys, values = jax.tree.map(pin, (operands.keys, operands.values))
            operands = operands._replace(keys=keys, values=values)
        return call(scalars, operands)

    # Elsewhere, as in tests, Pallas interprets the kernel.
    mixed, log_sum = lax.platform_dependent(
        *(steps, scalars, operands),
        tpu=functools.partial(run, False),
        default=functools.partial(run, True),
    )
    return Partial(log_sum, jnp.ones_like(log_sum), mixed)


def _quotient(number: Any, divisor: int) -> Any:
    """Return the quotient of a number from 0 on, rounded down; of a negative one, rounded up."""
    return lax.div(number, jnp.int32(divisor))


def _schedule(
    length: Int[Array, "B"],
    oldest: Int[Array, "B X"] | None,
    block: int,
    most_blocks: int,
    sink_blocks: int,
) -> tuple[Int[Array, " steps"], Int[Array, "B"], Int[Array, "B"], Int[Array, ""]]:
    """Return `row`, `begin` and `skipped` as in `_Scalars`, and the number of steps.

    Rows of `length` tokens are read in blocks of `block` tokens, `most_blocks` at most: the first
    `sink_blocks`, and those from the oldest position on. Each row has a step at least, which writes
    its result.
    """
    skipped, blocks = jnp.zeros_like(length), pl.cdiv(length, block)
    if oldest is not None:
        first = jnp.minimum(jnp.maximum(oldest.min(axis=1), 0) // block, blocks)
        skipped = jnp.maximum(first - sink_blocks, 0)
    count = jnp.maximum(blocks - skipped, 1)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    step = jnp.arange(len(length) * most_blocks, dtype=jnp.int32)
    row = (ends[None, :] <= step[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(row, len(length) - 1), ends - count, skipped, ends[-1]


def _heads_at_a_time(heads: int, queries: int, width: int, block: int, itemsize: int) -> int:
    """Return how many of `heads` a step handles: a divisor for which its blocks fit into memory."""
    lanes = pl.cdiv(width, _LANES) * _LANES
    # Blocks exist twice: one is computed with while the other is read or written.
    entries = 2 * 2 * block * lanes * itemsize
    size = entries + queries * 4 * (2 * 2 * lanes + 4 * _LANES)
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return max((count for count in divisors if count * size <= _MOST_BYTES), default=1)


def _program(
    scalars: _Scalars,
    refs: _Operands,
    mixed_ref: Any,
    log_sum_ref: Any,
    peak_ref: Any,
    denominator_ref: Any,
    *,
    hidden: bool,
    softcap: float | None,
    sinks: int,
    sink_blocks: int,
) -> None:
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    row = scalars.row[step]
    length, pieces = scalars.length[row], len(refs.keys)
    group, tile, _ = mixed_ref.shape
    size = refs.keys[0][0].shape[1]

    @pl.when((step == 0) | (scalars.row[jnp.maximum(step - 1, 0)] != row))
    def begin() -> None:
        peak_ref[...] = jnp.full(peak_ref.shape, -jnp.inf, jnp.float32)
        denominator_ref[...] = jnp.zeros(denominator_ref.shape, jnp.float32)
        mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)

    def add(first: jax.Array, keys: tuple, values: tuple) -> None:
        position = first + lax.broadcasted_iota(jnp.int32, (tile, size), 1)
        visible = position < length
        if refs.oldest is not None:
            visible &= (position >= refs.oldest[...]) | (position < sinks)
        committed = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0) < length
        for head in range(group):
            query = refs.query[head]
            multiply = functools.partial(
                lax.dot_general,
                precision=full_precision(query.dtype),
                preferred_element_type=jnp.float32,
            )
            key, factor = _load(keys, head)
            scores = multiply(query, key.astype(query.dtype), (((1,), (1,)), ((), ())))
            scores = scores if factor is None else scores * factor
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(visible, scores, -jnp.inf)
            peak = peak_ref[head]
            higher = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
            anchor = jnp.where(higher == -jnp.inf, 0.0, higher)
            weights, scale = jnp.exp(scores - anchor), jnp.exp(peak - anchor)
            peak_ref[head] = higher
            denominator_ref[head] = denominator_ref[head] * scale + weights.sum(
                axis=1, keepdims=True
            )
            value, factor = _load(values, head)
            weights = weights if factor is None else weights * factor
            if hidden:
                value = jnp.where(committed, value.astype(jnp.float32), 0.0)
            weights, value = weights.astype(query.dtype), value.astype(query.dtype)
            mixed = multiply(weights, value, (((1,), (0,)), ((), ())))
            mixed_ref[head] = mixed_ref[head] * scale + mixed

    for piece, (keys, values) in enumerate(zip(refs.keys, refs.values, strict=True)):
        first = (scalars.block(step, sink_blocks) * pieces + piece) * size
        pl.when(first < length)(functools.partial(add, first, keys, values))

    @pl.when((step == last) | (scalars.row[jnp.minimum(step + 1, last)] != row))
    def end() -> None:
        denominator = denominator_ref[...]
        log_sum_ref[...] = peak_ref[...] + jnp.log(denominator)
        mixed_ref[...] = mixed_ref[...] / jnp.where(denominator > 0.0, denominator, 1.0)


def _load(refs: tuple[Any, ...], head: int) -> tuple[jax.Array, jax.Array | None]:
    """Return one head's keys or values of a piece, and factors [1, Y] for its tokens, if any."""
    if len(refs) == 1:
        return refs[0][head], None
    integers, exponents = refs
    # Not every TPU converts from 8 to 16 bits directly.
    return integers[head].astype(jnp.float32), powers_of_two(exponents[head])
