"""The cache of committed keys and values, and the window of a round's new tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.core.cached_entries import Entries, decode, empty_entries, encode
from specjax.core.recurrent_state import RecurrentState, RecurrentWindow

_COPIED = 256
"""The most tokens that are copied at a time from row to row."""
_SMALL_ROW = 2**16
"""The largest number of entries of a row that is selected rather than scattered."""


@struct.dataclass
class Window:
    """Keys and values of one round's speculative tokens, which are kept apart from the cache.

    Slots not yet written hold zeros, so that masked scores stay finite. `positions` are the tokens'
    positions, stored only for models whose attention depends on them (sliding windows). In models
    with recurrent layers L counts those with attention, and `recurrent` belongs to the others.
    """

    k: Float[Array, "L B G W C"]
    v: Float[Array, "L B G W C"]
    positions: Int[Array, "B W"] | None = None
    recurrent: RecurrentWindow | None = None

    def padded(self, slots: int) -> Window:
        """Return the window with `slots` more slots, whose keys and values are zero, at its end."""
        return Window(
            *(_pad(keys_or_values, 3, slots) for keys_or_values in (self.k, self.v)),
            self.positions if self.positions is None else _pad(self.positions, 1, slots),
            self.recurrent and self.recurrent.padded(slots),
        )

    def at_slots(self, slots: slice | Int[np.ndarray, "A"]) -> Window:
        """Return the window with only the given slots, in that order."""
        positions = self.positions if self.positions is None else self.positions[:, slots]
        recurrent = self.recurrent and self.recurrent.at_slots(slots)
        return Window(self.k[:, :, :, slots], self.v[:, :, :, slots], positions, recurrent)

    def take(self, rows: Int[Array, "A"]) -> Window:
        """Return the window with only the given rows, in that order."""
        positions = self.positions if self.positions is None else self.positions[rows]
        recurrent = self.recurrent and self.recurrent.take(rows)
        return Window(self.k[:, rows], self.v[:, rows], positions, recurrent)

    def admit(self, rows: Int[Array, "A"], new: Window) -> Window:
        """Return the window with row i of `new` written at row `rows[i]`.

        Rows whose index is out of range are dropped.
        """
        positions = self.positions
        if positions is not None:
            positions = positions.at[rows].set(new.positions, mode="drop")
        return Window(
            self.k.at[:, rows].set(new.k, mode="drop"),
            self.v.at[:, rows].set(new.v, mode="drop"),
            positions,
            self.recurrent and self.recurrent.admit(rows, new.recurrent),
        )


@struct.dataclass
class KVCache:
    """Keys and values of the committed tokens of each row: the first `length` slots.

    `k` and `v` [L, B, G, S, C] are arrays, or integers with exponents (`Int8Entries`). The other
    slots hold arbitrary values, which readers must mask. With `pages`, `k` and `v` are arrays
    [L, P, G, page, C] of pages, and row b has its tokens in the pages `pages[b]`, in order; numbers
    out of range stand for no page. The pages may be a pool that all rows share (Kwon et al. 2023,
    arXiv:2309.06180), or the rows of another cache, each a page of its own (`lend`). Pages and rows
    are divided into `shards` equal parts, and numbers in `pages` count from the first page of a
    row's part. Without arrays it only has lengths, of rows whose entries another cache holds.
    `recurrent` is the state of recurrent layers after the committed tokens, in models that have
    some: it always belongs to the rows, also if their keys and values are lent or in pages.
    """

    k: Entries | None
    v: Entries | None
    length: Int[Array, "B"]
    pages: Int[Array, "B N"] | None = None
    shards: int = struct.field(pytree_node=False, default=1)
    recurrent: RecurrentState | None = None

    @property
    def capacity(self) -> int:
        """The number of tokens that a row can hold (S)."""
        return self.k.shape[3] * (1 if self.pages is None else self.pages.shape[1])

    def rounded(self, entries: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
        """Return keys or values rounded to numbers that the cache can store.

        A window's keys and values are rounded before attention reads them, so that a token has the
        same keys and values before and after it is committed.
        """
        return decode(encode(entries, self.k.dtype), entries.dtype)

    def take(self, rows: Int[Array, "A"]) -> KVCache:
        """Return the cache with only the given rows, in that order; it must not have pages."""
        k, v = jax.tree.map(lambda array: array[:, rows], (self.k, self.v))
        recurrent = self.recurrent and self.recurrent.take(rows)
        return KVCache(k, v, self.length[rows], recurrent=recurrent)

    def admit(self, rows: Int[Array, "A"], new: KVCache) -> KVCache:
        """Return the cache with row i of `new` written at row `rows[i]`.

        Rows whose index is out of range are dropped. If `new` has lengths only, the rows already
        hold its entries.
        """

        def put_entries(into: jax.Array, new: jax.Array) -> jax.Array:
            return into.at[:, rows].set(new, mode="drop")

        k, v = self.k, self.v
        if new.k is not None:
            k, v = jax.tree.map(put_entries, (k, v), (new.k, new.v))
        length = set_rows(self.length, rows, new.length)
        recurrent = self.recurrent and self.recurrent.admit(rows, new.recurrent)
        return self.replace(k=k, v=v, length=length, recurrent=recurrent)

    def gathered(
        self, slots: Int[Array, "B T"] | Int[Array, "B L G T"], length: Int[Array, "B"]
    ) -> KVCache:
        """Return a cache of copies of the tokens at `slots`, of which the first `length` count.

        `slots` are the same in all layers and heads, or not; those out of range are clipped. The
        state of recurrent layers stays that after all tokens.
        """
        if slots.ndim == 2:
            slots = slots[:, None, None]
        index = jnp.minimum(jnp.moveaxis(slots, 0, 1), self.capacity - 1)
        if self.pages is not None:
            return self._gathered_from_pages(index, length)

        def gather(array: jax.Array) -> jax.Array:
            return jnp.take_along_axis(array, index[..., None], axis=3)

        k, v = jax.tree.map(gather, (self.k, self.v))
        return KVCache(k, v, length, recurrent=self.recurrent)

    def _gathered_from_pages(
        self, index: Int[Array, "#L B #G T"], length: Int[Array, "B"]
    ) -> KVCache:
        """Return the tokens at `index`, with 0 for those that do not count.

        A page may hold numbers of an earlier row that are not finite, and masking would not hide
        them.
        """
        layers, _, heads, size, _ = self.k.shape
        counts = (jnp.arange(index.shape[3])[None, :] < length[:, None])[None, :, None, :, None]

        def of_rows(array: jax.Array, pages: jax.Array, index: jax.Array) -> jax.Array:
            where = (
                jnp.arange(layers)[:, None, None, None],
                pages[jnp.arange(len(pages))[None, :, None, None], index // size],
                jnp.arange(heads)[None, None, :, None],
                index % size,
            )
            shape = (layers, len(pages), heads, index.shape[3])
            return array.at[tuple(jnp.broadcast_to(one, shape) for one in where)].get(mode="clip")

        def gather(array: jax.Array) -> jax.Array:
            taken = by_shard(self.shards, of_rows, (1, 0, 1), 1, array, self.pages, index)
            return jnp.where(counts, taken, jnp.zeros((), taken.dtype))

        k, v = jax.tree.map(gather, (self.k, self.v))
        return KVCache(k, v, length, recurrent=self.recurrent)

    def cleared(self, rows: Int[Array, "A"]) -> KVCache:
        """Return the cache with zeros in `rows`, all in range."""

        def clear(array: jax.Array) -> jax.Array:
            # A scatter would need the zeros as an operand of their own.
            for row in rows:
                zeros = jnp.zeros((array.shape[0], 1, *array.shape[2:]), array.dtype)
                array = lax.dynamic_update_slice(array, zeros, (0, row, 0, 0, 0))
            return array

        k, v = jax.tree.map(clear, (self.k, self.v))
        return self.replace(k=k, v=v)

    def lend(
        self,
        rows: Int[Array, "A"],
        length: Int[Array, "A"],
        recurrent: RecurrentState | None = None,
    ) -> KVCache:
        """Return a view of `rows`, in range, with these lengths and states of recurrent layers."""
        pages = rows[:, None] if self.pages is None else self.pages[rows]
        return self.replace(length=length, pages=pages, recurrent=recurrent)

    def without_entries(self) -> KVCache:
        """Return the cache without keys and values."""
        return KVCache(None, None, self.length, recurrent=self.recurrent)

    def copied(
        self, sources: Int[Array, "A"], rows: Int[Array, "A"], length: Int[Array, "A"]
    ) -> KVCache:
        """Return the cache with the first `length` entries of `sources` copied to `rows`.

        A few tokens are copied at a time, so that no row exists twice; rows that are their own
        source take no time.
        """
        size = math.gcd(_COPIED, self.capacity)
        count = jnp.where(sources == rows, 0, length)
        slots = jnp.broadcast_to(jnp.arange(size), (len(rows), size))

        def copy(index: Int[Array, ""], view: KVCache) -> KVCache:
            first = index * size

            def read(array: jax.Array) -> jax.Array:
                shape = (array.shape[0], 1, array.shape[2], size, array.shape[4])
                return jnp.concatenate(
                    [lax.dynamic_slice(array, (0, row, 0, first, 0), shape) for row in sources],
                    axis=1,
                )

            new = jax.tree.map(read, (view.k, view.v))
            view = view.replace(length=jnp.full_like(length, first))
            return _append(view, new, slots, jnp.clip(count - first, 0, size))

        view = lax.fori_loop(0, (count.max() + size - 1) // size, copy, self.lend(rows, count))
        return self.replace(k=view.k, v=view.v)

    def release(self, released: Bool[Array, "B"]) -> KVCache:
        """Return the cache with the rows marked in `released` emptied: their length is 0."""
        return self.replace(length=jnp.where(released, 0, self.length))


def make_cache(
    num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """Return an empty cache: keys and values of shape [L, B, G, S, C], and lengths of 0.

    L is `num_layers`, B `batch`, G `kv_heads`, S `capacity` in tokens, and C `head_dim`. `dtype` is
    int8 for `Int8Entries`.
    """
    shape = (num_layers, batch, kv_heads, capacity, head_dim)
    k, v = (empty_entries(shape, jnp.dtype(dtype)) for _ in range(2))
    return KVCache(k, v, jnp.zeros(batch, jnp.int32))


def commit(
    cache: KVCache, window: Window, slots: Int[Array, "B T"], count: Int[Array, "B"]
) -> KVCache:
    """Return the cache with the first `count` of each row's window `slots` appended in order.

    Slots beyond `count`, and tokens without a page, get an out-of-range index, which the scatter
    drops, so that rows with different counts need no loop and a donated cache is updated in place.
    The state of recurrent layers advances over these slots, which are a path.
    """
    dtype = cache.k.dtype
    if cache.recurrent is not None:
        recurrent = cache.recurrent.advanced(window.recurrent, slots, count)
        cache = cache.replace(recurrent=recurrent)
    return _append(cache, (encode(window.k, dtype), encode(window.v, dtype)), slots, count)


def _append(
    cache: KVCache,
    new: tuple[Entries, Entries],
    slots: Int[Array, "B T"],
    count: Int[Array, "B"],
) -> KVCache:
    """Return the cache with the first `count` of each row's `slots` of keys and values appended."""
    step = jnp.arange(slots.shape[1])[None, :]
    keep = step < count[:, None]
    target = jnp.where(keep, cache.length[:, None] + step, cache.capacity)
    source = jnp.where(keep, slots, 0)[None, :, None, :, None]

    def put_at(
        into: jax.Array, new: jax.Array, where: jax.Array, dimensions: lax.ScatterDimensionNumbers
    ) -> jax.Array:
        index = jnp.broadcast_to(where[None, :, None], (*new.shape[:3], *where.shape[1:]))
        mode = lax.GatherScatterMode.FILL_OR_DROP
        return lax.scatter(into, index, new, dimensions, mode=mode)

    def put_in_pages(
        into: jax.Array, new: jax.Array, pages: jax.Array, target: jax.Array
    ) -> jax.Array:
        none, size = into.shape[1], into.shape[3]
        pages = jnp.take_along_axis(pages, target // size, axis=1, mode="fill", fill_value=none)
        where = jnp.stack([pages, target % size], axis=2)
        return put_at(into, new, where, _APPEND_TO_PAGES)

    def append(into: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.take_along_axis(new, source, axis=3)
        if cache.pages is None:
            return put_at(into, new, target[:, :, None], _APPEND)
        operands = into, new, cache.pages, target
        return by_shard(cache.shards, put_in_pages, (1, 1, 0, 0), 1, *operands)

    k, v = jax.tree.map(append, (cache.k, cache.v), new)
    return cache.replace(k=k, v=v, length=cache.length + count)


def by_shard(
    shards: int, function: Callable[..., jax.Array], axes: Sequence[int], out: int, *operands: Any
) -> jax.Array:
    """Return `function(*operands)`, computed for each of `shards` equal parts of the operands.

    `axes` are the axes along which the operands, arrays or trees of arrays, are divided, and `out`
    is that along which the results are joined. The parts are a batch dimension of all that the
    function does, so that a mesh over which they are sharded exchanges nothing.
    """
    if shards == 1:
        return function(*operands)

    def divided(axis: int, operand: Any) -> Any:
        def divide(array: jax.Array) -> jax.Array:
            return array.reshape(*array.shape[:axis], shards, -1, *array.shape[axis + 1 :])

        return jax.tree.map(divide, operand)

    result = jax.vmap(function, tuple(axes), out)(*map(divided, axes, operands))
    return result.reshape(*result.shape[:out], -1, *result.shape[out + 2 :])


def _pad(array: jax.Array, axis: int, slots: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, slots)
    return jnp.pad(array, widths)


# All axes before the tokens are batch dimensions of the scatter: each device of a mesh writes its
# own part, and no backend transposes the cache.
_APPEND = lax.ScatterDimensionNumbers(
    update_window_dims=(4,),
    inserted_window_dims=(3,),
    scatter_dims_to_operand_dims=(3,),
    operand_batching_dims=(0, 1, 2),
    scatter_indices_batching_dims=(0, 1, 2),
)
# A token's page is an index, so that rows are no batch dimension.
_APPEND_TO_PAGES = lax.ScatterDimensionNumbers(
    update_window_dims=(4,),
    inserted_window_dims=(1, 3),
    scatter_dims_to_operand_dims=(1, 3),
    operand_batching_dims=(0, 2),
    scatter_indices_batching_dims=(0, 2),
)


def set_rows(
    into: Shaped[Array, "B *rest"], rows: Int[Array, "A"], new: Shaped[Array, "A *rest"]
) -> Shaped[Array, "B *rest"]:
    """Return `into` with row i of `new` written at row `rows[i]`; rows out of range are dropped.

    No number is negative, and none in range occurs twice. Small rows are all written again, since a
    scatter is a loop on a CPU, which takes long to compile.
    """
    if math.prod(into.shape[1:]) > _SMALL_ROW:
        return into.at[rows].set(new, mode="drop")
    matches = rows[None, :] == jnp.arange(len(into))[:, None]
    written = matches.any(axis=1).reshape(-1, *(1 for _ in into.shape[1:]))
    return jnp.where(written, new[jnp.argmax(matches, axis=1)], into)


def put(
    into: Shaped[Array, "B S *rest"],
    slots: Int[Array, "#B T"],
    new: Shaped[Array, "B T *rest"],
) -> Shaped[Array, "B S *rest"]:
    """Return `into` with `new` written at each row's `slots`; slots out of range are dropped."""
    slots = jnp.broadcast_to(slots, new.shape[:2])
    put_row = jax.vmap(lambda row, slots, values: row.at[slots].set(values, mode="drop"))
    return put_row(into, slots, new)
