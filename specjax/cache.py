"""Keys and values of committed tokens, and of the window a round works in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


@struct.dataclass
class Window:
    """Keys and values of one round's speculative tokens; never part of a cache.

    A slot that was never written holds zeros, so that a masked score stays finite. `positions` are
    those of the slots' tokens, for models whose attention depends on them (sliding windows).
    """

    k: Float[Array, "L B G W C"]
    v: Float[Array, "L B G W C"]
    positions: Int[Array, "B W"] | None = None

    def padded(self, slots: int) -> Window:
        """The window with so many more slots, of zeros."""
        return Window(
            *(_pad(part, 3, slots) for part in (self.k, self.v)),
            self.positions if self.positions is None else _pad(self.positions, 1, slots),
        )

    def take(self, rows: Int[Array, "A"]) -> Window:
        """The window of some of the rows."""
        positions = self.positions if self.positions is None else self.positions[rows]
        return Window(self.k[:, rows], self.v[:, rows], positions)

    def admit(self, rows: Int[Array, "A"], new: Window) -> Window:
        """The window with the A rows of `new` at `rows`; those out of range are dropped."""
        positions = self.positions
        if positions is not None:
            positions = positions.at[rows].set(new.positions, mode="drop")
        return Window(
            self.k.at[:, rows].set(new.k, mode="drop"),
            self.v.at[:, rows].set(new.v, mode="drop"),
            positions,
        )


@struct.dataclass
class KVCache:
    """Keys and values of each row's first `length` committed tokens, and of nothing else.

    What lies at and beyond `length` is unspecified and must be masked by the reader.
    """

    k: Float[Array, "L B G S C"]
    v: Float[Array, "L B G S C"]
    length: Int[Array, "B"]

    @property
    def capacity(self) -> int:
        """Number of tokens a row can hold (S)."""
        return self.k.shape[3]

    def take(self, rows: Int[Array, "A"]) -> KVCache:
        """The cache of some of the rows."""
        return KVCache(self.k[:, rows], self.v[:, rows], self.length[rows])

    def admit(self, rows: Int[Array, "A"], new: KVCache) -> KVCache:
        """The cache with the A rows of `new` at `rows`; those out of range are dropped."""
        return KVCache(
            self.k.at[:, rows].set(new.k, mode="drop"),
            self.v.at[:, rows].set(new.v, mode="drop"),
            self.length.at[rows].set(new.length, mode="drop"),
        )

    def release(self, rows: Int[Array, "A"]) -> KVCache:
        """The cache with nothing committed in `rows`."""
        return self.replace(length=self.length.at[rows].set(0, mode="drop"))


def make_cache(
    num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache: zeros of shape [L, B, G, S, C], every length 0."""
    shape = (num_layers, batch, kv_heads, capacity, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))


def commit(
    cache: KVCache, window: Window, slots: Int[Array, "B T"], count: Int[Array, "B"]
) -> KVCache:
    """The cache with each row's first `count` slots of `slots` appended, in that order.

    Entries at and beyond `count` are sent out of range and dropped by the scatter, so that rows
    of different counts need no loop and the donated cache is updated in place.
    """
    step = jnp.arange(slots.shape[1])[None, :]
    keep = step < count[:, None]
    target = jnp.where(keep, cache.length[:, None] + step, cache.capacity)
    source = jnp.where(keep, slots, 0)[None, :, None, :, None]

    def append(into: jax.Array, new: jax.Array) -> jax.Array:
        layers, batch, heads = into.shape[:3]
        shape = (layers, batch, heads, *slots.shape[1:], 1)
        return lax.scatter(
            into,
            jnp.broadcast_to(target[None, :, None, :, None], shape),
            jnp.take_along_axis(new, source, axis=3),
            _APPEND,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )

    return KVCache(append(cache.k, window.k), append(cache.v, window.v), cache.length + count)


def _pad(part: jax.Array, axis: int, more: int) -> jax.Array:
    widths = [(0, 0)] * part.ndim
    widths[axis] = (0, more)
    return jnp.pad(part, widths)


# All axes in front of the tokens are batch dimensions of the scatter: each device of a mesh writes
# its own part, and no backend has a reason to transpose the cache.
_APPEND = lax.ScatterDimensionNumbers(
    update_window_dims=(4,),
    inserted_window_dims=(3,),
    scatter_dims_to_operand_dims=(3,),
    operand_batching_dims=(0, 1, 2),
    scatter_indices_batching_dims=(0, 1, 2),
)


def put(
    into: Shaped[Array, "B S *rest"],
    where: Int[Array, "#B T"],
    new: Shaped[Array, "B T *rest"],
) -> Shaped[Array, "B S *rest"]:
    """Each row with `new` written at its own slots; those out of range are dropped."""
    where = jnp.broadcast_to(where, new.shape[:2])
    return jax.vmap(lambda row, at, values: row.at[at].set(values, mode="drop"))(into, where, new)
