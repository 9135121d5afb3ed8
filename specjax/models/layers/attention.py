"""Attention of a few new tokens over the committed cache and the round's window.

Each of the two score blocks has its own softmax, and the results are merged by their log-sum-exp,
so that keys and values are not concatenated. (Online softmax: Milakov and Gimelshein 2018,
arXiv:1805.02867.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, by_shard
from specjax.core.cached_entries import Entries, decode
from specjax.distributed.sharding import DATA, partition
from specjax.models.layers.matmul import full_precision

CACHE_BLOCK = 256
"""The committed tokens per row that are read at a time; a cache's capacity is a multiple of it."""
_ROW_BLOCK = 128
"""The committed tokens that are read at a time when each row is read separately."""
_POOL = 5
"""The number of neighbouring tokens over which attention is averaged to choose among them."""
_LOWEST = -1e30
_MOST_SCORES = {"cpu": 1 << 21, "accelerator": 1 << 27}
"""The number of attention scores computed at a time in training, on each device."""


class Partial(NamedTuple):
    """A softmax-weighted sum over some of the keys, not yet divided by its denominator.

    X counts the queries of one key/value head: T tokens times H / G query heads.
    """

    peak: Float[Array, "B G X 1"]
    denominator: Float[Array, "B G X 1"]
    weighted: Float[Array, "B G X C"]


def group_queries(
    query: Float[Array, "B T H C"], kv_heads: int, scale: float | None = None
) -> Float[Array, "B G X C"]:
    """Return queries grouped by the key/value head that they share, multiplied by `scale`.

    `scale` is 1/sqrt(C) by default.
    """
    batch, tokens, heads, width = query.shape
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, width)
    factor = jnp.float32(width**-0.5 if scale is None else scale)
    # The factor is not rounded to the queries' dtype.
    return (grouped.astype(jnp.float32) * factor).astype(query.dtype)


def ungroup(mixed: Float[Array, "B G X C"], tokens: int) -> Float[Array, "B T H C"]:
    """Return the attention results `mixed`, grouped by key head, as [B, T, H, C] with T = `tokens`.

    This inverts `group_queries`, except for the scale.
    """
    batch, kv_heads, queries, width = mixed.shape
    split = mixed.reshape(batch, kv_heads, tokens, queries // tokens, width)
    return split.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1, width)


def attend(
    query: Float[Array, "B G X C"],
    key: Float[Array, "B G Y C"],
    value: Float[Array, "B G Y C"],
    visible: Bool[Array, "#B 1 #X Y"],
    softcap: float | None = None,
    *,
    rounded: bool = False,
) -> Partial:
    """Return the softmax-weighted sum over one block of keys, accumulated in float32.

    A query without visible keys has denominator 0. `softcap` limits scores to c tanh(score/c)
    (Gemma 2). `rounded` (training) lets accelerators multiply float32 in fewer bits.
    """
    precision = None if rounded else full_precision(query.dtype)
    multiply = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=jnp.float32
    )
    scores = multiply("bgxc,bgyc->bgxy", query, key)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = scores.max(axis=-1, keepdims=True)
    # A row without a visible key has peak -inf; with 0 instead, exp(-inf - peak) is 0.
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(peak), 0.0, peak))
    weighted = multiply("bgxy,bgyc->bgxc", weights.astype(value.dtype), value)
    return Partial(peak, weights.sum(axis=-1, keepdims=True), weighted)


def attend_in_blocks(
    query: Float[Array, "B G X C"],
    key: Float[Array, "B G Y C"],
    value: Float[Array, "B G Y C"],
    visible: Bool[Array, "#B 1 X Y"],
    most_scores: int | None = None,
    softcap: float | None = None,
    *,
    rounded: bool = False,
) -> Partial:
    """Return the result of `attend`, computing about `most_scores` scores at a time.

    The other arguments are those of `attend`. A block is a group of rows, or a block of queries of
    one large row. Gradients recompute the scores. By default `most_scores` is chosen to fit into a
    CPU's cache; it is much larger on accelerators.
    """
    if most_scores is None:
        most_scores = _MOST_SCORES["cpu" if jax.default_backend() == "cpu" else "accelerator"]
    batch, heads, queries, _ = query.shape
    scores_per_row = heads * queries * key.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    data_shards = 1 if mesh.empty else mesh.shape[DATA]
    rows_per_group = max(data_shards, data_shards * (most_scores // scores_per_row))
    attend_all = functools.partial(attend, softcap=softcap, rounded=rounded)
    while batch % rows_per_group or rows_per_group % data_shards:
        rows_per_group -= 1
        if rows_per_group < data_shards:
            return attend_all(query, key, value, visible)
    num_groups = batch // rows_per_group
    block = min(
        queries, max(1, most_scores * data_shards // (rows_per_group * heads * key.shape[2]))
    )

    @jax.checkpoint
    def attend_group(group: tuple[jax.Array, ...]) -> Partial:
        return _attend_queries(*group, block, attend_all)

    if num_groups == 1 and block == queries:
        return attend_all(query, key, value, visible)
    visible = jnp.broadcast_to(visible, (batch, *visible.shape[1:]))

    def into_groups(x: jax.Array) -> jax.Array:
        # Adjacent rows go to different groups, so that on a mesh each device has work in each one.
        return jnp.moveaxis(x.reshape(rows_per_group, num_groups, *x.shape[1:]), 1, 0)

    def from_groups(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, *x.shape[2:])

    results = lax.map(attend_group, tuple(map(into_groups, (query, key, value, visible))))
    return Partial(*map(from_groups, results))


def _attend_queries(
    query: Float[Array, "B G X C"],
    key: Float[Array, "B G Y C"],
    value: Float[Array, "B G Y C"],
    visible: Bool[Array, "B 1 X Y"],
    block: int,
    attend_some: Callable[..., Partial],
) -> Partial:
    """Return `attend_some` of all queries, calling it with `block` queries at a time."""
    batch, heads, queries, _ = query.shape
    count = -(-queries // block)
    if count == 1:
        return attend_some(query, key, value, visible)
    padding = ((0, 0), (0, 0), (0, count * block - queries), (0, 0))

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(*x.shape[:2], count, block, x.shape[3]), 2, 0)

    @jax.checkpoint
    def attend_block(block_inputs: tuple[jax.Array, jax.Array]) -> Partial:
        return attend_some(block_inputs[0], key, value, block_inputs[1])

    results = lax.map(attend_block, (split(query), split(visible)))
    return Partial(
        *(
            jnp.moveaxis(result, 0, 2).reshape(batch, heads, count * block, -1)[:, :, :queries]
            for result in results
        )
    )


def merge(a: Partial, b: Partial) -> Partial:
    """Return attention over the keys of both partial results; associative up to rounding."""
    peak = jnp.maximum(a.peak, b.peak)
    anchor = jnp.where(jnp.isneginf(peak), 0.0, peak)
    scale_a, scale_b = jnp.exp(a.peak - anchor), jnp.exp(b.peak - anchor)
    return Partial(
        peak,
        a.denominator * scale_a + b.denominator * scale_b,
        a.weighted * scale_a + b.weighted * scale_b,
    )


def with_sinks(mixed: Partial, sinks: Float[Array, " H"]) -> Partial:
    """Return attention over the keys of `mixed` and, for each head, one key with the value 0.

    `sinks` has the scores of these keys, one per query head.
    """
    kv_heads, queries = mixed.peak.shape[1:3]
    of_heads = sinks.astype(jnp.float32).reshape(kv_heads, -1)
    scores = jnp.tile(of_heads, (1, queries // of_heads.shape[1]))[None, :, :, None]
    peak = jnp.broadcast_to(scores, mixed.peak.shape)
    return merge(mixed, Partial(peak, jnp.ones_like(peak), jnp.zeros_like(mixed.weighted)))


def _read(
    cache: KVCache, layer: Int[Array, ""] | int, first: Int[Array, ""] | int, count: int, dtype: Any
) -> tuple[Float[Array, "B G Y C"], Float[Array, "B G Y C"]]:
    """Return the keys and values of all rows' tokens `first` to `first` + `count` in a layer.

    `first` is a multiple of `count`, which divides a cache's page or is a multiple of it. Values
    in pages are 0 where no token is committed: a page may hold numbers of an earlier row that are
    not finite, and masking would not hide them.
    """
    if cache.pages is None:
        where = (layer, 0, 0, first)
        size = (1, *cache.k.shape[1:3], count)
        return tuple(_slice(entries, where, size, dtype) for entries in (cache.k, cache.v))
    rows, page = len(cache.pages), cache.k.shape[3]
    piece = min(page, count)
    pages = lax.dynamic_slice(
        cache.pages, (0, first // page), (rows, count // piece), allow_negative_indices=False
    )

    def part(array: jax.Array) -> jax.Array:
        heads, width = array.shape[2], array.shape[4]

        def of_rows(array: jax.Array, pages: jax.Array) -> jax.Array:
            def of_page(number: jax.Array) -> jax.Array:
                where, size = (layer, number, 0, first % page, 0), (1, 1, heads, piece, width)
                return lax.dynamic_slice(array, where, size, allow_negative_indices=False)[0, 0]

            pieces = jax.vmap(jax.vmap(of_page, out_axes=1))(pages)
            return pieces.reshape(len(pages), heads, count, width)

        return by_shard(cache.shards, of_rows, (1, 0), 0, array, pages)

    key, value = (decode(jax.tree.map(part, entries), dtype) for entries in (cache.k, cache.v))
    return key, _hidden(value, cache.length, first + jnp.arange(count))


def _slice(
    entries: Entries, where: tuple, size: tuple[int, ...], dtype: jnp.dtype
) -> Float[Array, "B G Y C"]:
    """Return a slice of one layer's cached keys or values as a floating-point array."""

    def part(array: jax.Array) -> jax.Array:
        # Indices are never negative; without this, XLA code to wrap negative ones is generated.
        full_size = (*size, array.shape[-1])
        return lax.dynamic_slice(array, (*where, 0), full_size, allow_negative_indices=False)[0]

    return decode(jax.tree.map(part, entries), dtype)


def _hidden(
    values: Float[Array, "B G Y C"], length: Int[Array, "B"], positions: Int[Array, " Y"]
) -> Float[Array, "B G Y C"]:
    """Return values with 0 at `positions` that are not committed."""
    committed = (positions[None, :] < length[:, None])[:, None, :, None]
    return jnp.where(committed, values, jnp.zeros((), values.dtype))


def blocks_to_read(
    oldest: Int[Array, "*N"] | None, sinks: int, blocks: Int[Array, ""], step: int
) -> tuple[Int[Array, ""] | int, Callable[[Int[Array, ""]], Int[Array, ""]]]:
    """Return the first index of a loop up to `blocks`, and the function from an index to a block.

    The loop reads the blocks of `step` tokens that hold the first `sinks`, and those from the
    oldest position of all queries on; without `oldest`, all blocks.
    """
    if oldest is None:
        return 0, lambda index: index
    first = jnp.maximum(oldest.min(), 0) // step
    if not sinks:
        return first, lambda index: index
    of_sinks = -(-sinks // step)
    skipped = jnp.maximum(jnp.minimum(first, blocks) - of_sinks, 0)
    return skipped, lambda index: jnp.where(index < skipped + of_sinks, index - skipped, index)


def cached_blocks(cache: KVCache) -> Int[Array, ""]:
    """Return the number of cache blocks that the longest row fills, as a traced number."""
    step = min(CACHE_BLOCK, cache.capacity)
    return (cache.length.max() + step - 1) // step


def attend_cache(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    start: Partial,
    blocks: Int[Array, ""],
    oldest: Int[Array, "B X"] | None = None,
    softcap: float | None = None,
    sinks: int = 0,
) -> Partial:
    """Return `start` merged with attention over the first `blocks` blocks of one layer's cache.

    With `oldest`, each query attends to keys from that position on and to the first `sinks` keys,
    and blocks between them, and the oldest of all queries, are skipped. `softcap` limits scores to
    c tanh(score/c).
    """
    step = min(CACHE_BLOCK, cache.capacity)
    offsets = jnp.arange(step)
    first_index, block_at = blocks_to_read(oldest, sinks, blocks, step)

    def block(index: Int[Array, ""], total: Partial) -> Partial:
        first = block_at(index) * step
        key, value = _read(cache, layer, first, step, query.dtype)
        visible = _committed(cache.length, first + offsets, oldest, sinks)
        return merge(total, attend(query, key, value, visible, softcap))

    return lax.fori_loop(first_index, blocks, block, start)


def attend_rows(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    start: Partial,
    oldest: Int[Array, "B X"] | None = None,
    softcap: float | None = None,
    split: bool = False,
    sinks: int = 0,
) -> Partial:
    """Return the result of `attend_cache`, computed row by row, each over its own length.

    The arguments are those of `attend_cache`. On a mesh each device computes its own rows; heads
    are sharded over `model` if `split`, otherwise replicated.
    """
    operands = {**cache_operands(query, cache, layer, oldest), "start": ("heads", start)}
    attend_own = functools.partial(_attend_rows, softcap=softcap, sinks=sinks)
    return on_each_device(attend_own, operands, split)


def _attend_rows(
    query: Float[Array, "B G X C"],
    keys: Entries,
    values: Entries,
    length: Int[Array, "B"],
    layer: Int[Array, ""] | int,
    start: Partial,
    oldest: Int[Array, "B X"] | None = None,
    pages: Int[Array, "B N"] | None = None,
    *,
    softcap: float | None,
    sinks: int,
) -> Partial:
    batch, kv_heads, _, _ = query.shape
    page = keys.shape[3]
    step = page if page % _ROW_BLOCK else _ROW_BLOCK
    offsets = jnp.arange(step)
    size = (1, 1, kv_heads, step)

    def attend_row(row: tuple) -> Partial:
        index, *rest = row
        query, length, start, oldest = jax.tree.map(lambda leaf: leaf[None], rest)
        blocks = (length[0] + step - 1) // step
        first_index, block_at = blocks_to_read(oldest, sinks, blocks, step)

        def block(number: Int[Array, ""], total: Partial) -> Partial:
            first = block_at(number) * step
            where = (layer, index, 0, first)
            if pages is not None:
                where = (layer, pages[index, first // page], 0, first % page)
            key, value = (_slice(entries, where, size, query.dtype) for entries in (keys, values))
            if pages is not None:
                value = _hidden(value, length, first + offsets)
            visible = _committed(length, first + offsets, oldest, sinks)
            return merge(total, attend(query, key, value, visible, softcap))

        total = lax.fori_loop(first_index, blocks, block, start)
        return jax.tree.map(lambda leaf: leaf[0], total)

    return lax.map(attend_row, (jnp.arange(batch), query, length, start, oldest))


def cache_operands(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    layer: Int[Array, ""] | int,
    oldest: Int[Array, "B X"] | None,
) -> dict[str, tuple[str, Any]]:
    """Return the operands of attention to committed keys, as `on_each_device` takes them.

    `pages` and `oldest` are left out where there are none.
    """
    operands = {
        "query": ("heads", query),
        "keys": ("cache", cache.k),
        "values": ("cache", cache.v),
        "length": ("rows", cache.length),
        "layer": ("whole", jnp.asarray(layer, jnp.int32)),
    }
    if cache.pages is not None:
        operands["pages"] = ("rows", cache.pages)
    if oldest is not None:
        operands["oldest"] = ("rows", oldest)
    return operands


def on_each_device(
    attend: Callable[..., Partial], operands: Mapping[str, tuple[str, Any]], split: bool
) -> Partial:
    """Return `attend(**operands)`; on a mesh, each device computes its own rows and heads.

    `operands` maps names to pairs (kind, value), where the kind says how the value is sharded:
    `heads` [B, G, ...], `cache` [L, B, G, ...], `rows` [B, ...], or `whole` for values that all
    devices get. Heads are replicated unless `split` is set.
    """
    values = {name: value for name, (_, value) in operands.items()}
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend(**values)
    shape = values["query"].shape[:2]
    heads = partition(("batch", "kv_heads" if split else None), shape, mesh)
    kinds = {
        "heads": heads,
        "cache": PartitionSpec(None, *heads),
        "rows": PartitionSpec(heads[0]),
        "whole": PartitionSpec(),
    }
    specs = {name: kinds[kind] for name, (kind, _) in operands.items()}
    attend_own = jax.shard_map(
        lambda values: attend(**values),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=heads,
        check_vma=False,
    )
    return attend_own(values)


def most_attended(
    query: Float[Array, "B G X C"], cache: KVCache, layer: Int[Array, ""] | int, count: int
) -> Int[Array, "B G A"]:
    """Return the positions of the `count` committed tokens with the most attention, by head.

    A token's attention is the sum of its weights in the softmax over committed keys, over all
    queries, averaged with those of its neighbours (SnapKV: Li et al. 2404.14469). Positions beyond
    a row's length come last. Rows are read one after the other, since a row has X S scores.
    """
    capacity = cache.capacity

    def of_row(cache: KVCache, row: tuple[jax.Array, ...]) -> Int[Array, "G A"]:
        index, query, length = row
        view = cache.lend(index[None], length[None])
        key = _read(view, layer, 0, capacity, query.dtype)[0][0]
        visible = jnp.arange(capacity) < length
        scores = jnp.einsum("gxc,gyc->gxy", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible[None, None], scores, _LOWEST), axis=-1)
        total = jnp.where(visible[None], weights.sum(axis=1), 0.0)
        pooled = lax.reduce_window(total, 0.0, lax.add, (1, _POOL), (1, 1), "SAME")
        return lax.top_k(jnp.where(visible[None], pooled, -1.0), count)[1]

    def of_rows(query: jax.Array, *parts: Any) -> jax.Array:
        cache = KVCache(*parts)
        rows = jnp.arange(len(query)), query, cache.length
        return lax.map(functools.partial(of_row, cache), rows)

    operands = query, cache.k, cache.v, cache.length, cache.pages
    return by_shard(cache.shards, of_rows, (0, 1, 1, 0, 0), 0, *operands)


def _committed(
    length: Int[Array, "B"],
    positions: Int[Array, " Y"],
    oldest: Int[Array, "B X"] | None,
    sinks: int,
) -> Bool[Array, "B 1 #X Y"]:
    """Return whether each query attends to the cached keys at `positions`, given rows' lengths."""
    visible = (positions[None, :] < length[:, None])[:, None, None, :]
    if oldest is None:
        return visible
    positions = positions[None, None, :]
    return visible & ((positions >= oldest[:, :, None]) | (positions < sinks))[:, None]
