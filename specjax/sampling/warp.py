"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Real

Parameter = Real[Array | np.ndarray, "*#rows"] | float | int

_BLOCK = 128
"""Values whose largest is looked for first, in `top_k`: a row of a TPU's registers."""


@dataclass(frozen=True)
class WarpFlags:
    """What at least one row asks for, known before compiling; the rest stays out of the program.

    `greedy` says that some row has temperature 0, `sampled` that some row has not. A flag that is
    True without need costs time; one that is False against the parameters gives wrong
    distributions, so let `of` derive them.
    """

    greedy: bool = True
    sampled: bool = True
    top_k: bool = True
    top_p: bool = True
    min_p: bool = True

    @classmethod
    def of(
        cls,
        temperature: Parameter,
        top_k: Parameter = 0,
        top_p: Parameter = 1.0,
        min_p: Parameter = 0.0,
    ) -> WarpFlags:
        """The flags of parameters that live on the host; of a JAX array it assumes every need."""

        def some(value: Any, asks: Callable[[Any], Any]) -> bool:
            # Reading a device array here would make the host wait for it.
            return not isinstance(value, np.ndarray | float | int) or bool(np.any(asks(value)))

        return cls(
            greedy=some(temperature, lambda t: t <= 0),
            sampled=some(temperature, lambda t: t > 0),
            top_k=some(top_k, lambda k: k > 0),
            top_p=some(top_p, lambda p: p < 1),
            min_p=some(min_p, lambda p: p > 0),
        )

    def union(self, other: WarpFlags) -> WarpFlags:
        """The flags of both sets of rows."""
        mine, others = astuple(self), astuple(other)
        return WarpFlags(*(one or two for one, two in zip(mine, others, strict=True)))


def warp(
    logits: Float[Array | np.ndarray, "*rows V"],
    temperature: Parameter,
    top_k: Parameter = 0,
    top_p: Parameter = 1.0,
    min_p: Parameter = 0.0,
    *,
    flags: WarpFlags | None = None,
) -> Float[Array, "*rows V"]:
    """Log-probabilities of the distribution that these sampling parameters make of `logits`.

    Applied in this order, each to what the one before has left: temperature, top-k, top-p, min-p.
    Each parameter is one number or an array with one entry per row. `temperature` 0 is greedy: 0.0
    at the first argmax and -inf elsewhere, and the other parameters do not matter. `top_k` 0,
    `top_p` 1 and `min_p` 0 mean off. top-k keeps the k largest, top-p the smallest set of likeliest
    tokens whose mass reaches `top_p`, min-p all of at least `min_p` times the largest probability;
    tokens that tie at a threshold are all kept.

    Half precision is computed in float32. A row without a finite logit has no distribution and
    stays -inf. `flags` leaves out of the program what no row asks for; they are derived where None.
    Raises ValueError for numbers out of range and for arrays that do not match the rows.
    """
    _check_numbers(temperature, top_k, top_p, min_p)
    if flags is None:
        flags = WarpFlags.of(temperature, top_k, top_p, min_p)
    logits = jnp.asarray(logits)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    rows = logits.shape[:-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    if not flags.sampled:
        return _greedy(logits, largest)

    def column(name: str, value: Parameter, dtype: Any) -> Array:
        array = jnp.asarray(value, dtype)
        if array.shape not in ((), rows):
            raise ValueError(
                f"{name} has shape {array.shape} but the logits have rows {rows}: "
                "pass one number or one entry per row"
            )
        return jnp.broadcast_to(array, rows)[..., None]

    heat = column("temperature", temperature, logits.dtype)
    # Shifting before dividing keeps the largest at exactly 0 for any temperature, however small.
    shifted = logits - jnp.where(largest > -jnp.inf, largest, 0)
    scores = shifted / jnp.where(heat > 0, heat, 1)
    weights = jnp.exp(scores)  # the probabilities, times a factor that makes the largest 1
    kept = jnp.ones(logits.shape, bool)

    if flags.top_k:
        kept &= _in_top_k(-scores, column("top_k", top_k, jnp.int32))
    if flags.top_p:
        weights = jnp.where(kept, weights, 0)
        kept &= _in_top_p(weights, column("top_p", top_p, logits.dtype))
    if flags.min_p:
        kept &= weights >= column("min_p", min_p, logits.dtype)

    total = jnp.sum(jnp.where(kept, weights, 0), axis=-1, keepdims=True)
    logp = jnp.where(kept, scores, -jnp.inf) - jnp.log(jnp.where(total > 0, total, 1))
    if not flags.greedy:
        return logp
    return jnp.where(heat > 0, logp, _greedy(logits, largest))


def argmax(
    values: Real[Array, "*rows V"], largest: Real[Array, "*rows 1"] | None = None
) -> Int[Array, "*rows"]:
    """The first position of the largest value, as int32; on CPU twice as fast as `jnp.argmax`.

    `largest` are those values, where they are known.
    """
    return _first(values, jnp.max(values, axis=-1, keepdims=True) if largest is None else largest)


def top_k(
    values: Float[Array, "*rows V"], count: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """The `count` largest of numbers and their positions, of equal ones the first; as `lax.top_k`.

    The largest are in the blocks with the largest maxima, so no more is sorted than a maximum of
    each block, and `count` blocks. (TPUs sort copies of everything for `lax.top_k`.)
    """
    *rows, vocab = values.shape
    blocks = -(-vocab // _BLOCK)
    if not 0 < count * 2 <= blocks:
        return tuple(lax.top_k(values, count))
    # Windows and slices, since a reshape into blocks is another layout, and so a copy, on TPUs.
    window = (*[1] * len(rows), _BLOCK)
    room = (*[(0, 0)] * len(rows), (0, blocks * _BLOCK - vocab))
    maxima = lax.reduce_window(values, -jnp.inf, lax.max, window, window, room)
    # In the order of their positions, so that of equal values the first is found.
    first = _BLOCK * jnp.sort(lax.top_k(maxima, count)[1], axis=-1)
    start = jnp.minimum(first, vocab - _BLOCK)
    found = _blocks_of(values, start)
    positions = start[..., None] + lax.broadcasted_iota(start.dtype, found.shape, found.ndim - 1)
    # The last block is shorter: what comes before it is another's.
    found = jnp.where(positions >= first[..., None], found, -jnp.inf)
    best, index = lax.top_k(found.reshape(*rows, -1), count)
    return best, jnp.take_along_axis(positions.reshape(*rows, -1), index, axis=-1)


@partial(jnp.vectorize, signature="(v),(k)->(k,b)")
def _blocks_of(row: Float[Array, "V"], starts: Int[Array, " k"]) -> Float[Array, "k block"]:
    """A block of each row from each of its starts on."""
    take = partial(lax.dynamic_slice_in_dim, row, slice_size=_BLOCK)
    return jax.vmap(take)(starts)


def _first(values: Real[Array, "*rows V"], largest: Real[Array, "*rows 1"]) -> Int[Array, "*rows"]:
    vocab = values.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    # Without a match (NaN) the last token, not one past the end, is the one to show up.
    return jnp.min(jnp.where(values == largest, index, vocab - 1), axis=-1)


def _greedy(
    logits: Float[Array, "*rows V"], largest: Float[Array, "*rows 1"]
) -> Float[Array, "*rows V"]:
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(index == _first(logits, largest)[..., None], 0.0, -jnp.inf).astype(
        logits.dtype
    )


def _in_top_k(
    depths: Float[Array, "*rows V"], top_k: Int[Array, "*rows 1"]
) -> Bool[Array, "*rows V"]:
    """Which tokens are among the k of least depth under the largest score; ties count as in."""
    depths = jnp.abs(depths)  # -0.0 has the bits of a negative number
    wanted = jnp.where(top_k > 0, top_k, depths.shape[-1])
    everything = jnp.full_like(depths[..., :1], jnp.inf)

    def fewer(limit: Float[Array, "*rows 1"]) -> Bool[Array, "*rows 1"]:
        return jnp.sum(depths < limit, axis=-1, keepdims=True, dtype=jnp.int32) < wanted

    def search() -> Float[Array, "*rows 1"]:
        return _last_float(fewer, depths[..., :1], jnp.inf)

    return depths <= lax.cond((top_k > 0).any(), search, lambda: everything)


def _in_top_p(
    weights: Float[Array, "*rows V"], top_p: Float[Array, "*rows 1"]
) -> Bool[Array, "*rows V"]:
    """Which tokens make up the likeliest `top_p` of the mass; ties count as in."""
    wanted = top_p * jnp.sum(weights, axis=-1, keepdims=True)

    def enough(limit: Float[Array, "*rows 1"]) -> Bool[Array, "*rows 1"]:
        mass = jnp.sum(jnp.where(weights >= limit, weights, 0), axis=-1, keepdims=True)
        return mass >= wanted

    def search() -> Float[Array, "*rows 1"]:
        return _last_float(enough, weights[..., :1], 1.0)

    limit = lax.cond((top_p < 1).any(), search, lambda: jnp.zeros_like(weights[..., :1]))
    return weights >= jnp.where(top_p < 1, limit, 0)


def _last_float(
    holds: Callable[[Float[Array, "*rows 1"]], Bool[Array, "*rows 1"]],
    like: Float[Array, "*rows 1"],
    top: float,
) -> Float[Array, "*rows 1"]:
    """The largest float in [0, top] at which `holds` is true.

    It holds at 0 and, once false, stays false. Non-negative floats are ordered as their bits are,
    so bisecting the bits finds it exactly, in as many steps as there are bits, where a sort would
    cost twenty times as much. The number of steps is fixed: a loop that waits for data would stall
    an accelerator in each.
    """
    dtype = like.dtype
    bits = {4: np.int32, 8: np.int64}[dtype.itemsize]
    end = int(np.asarray(top, dtype).view(bits)) + 1
    low, high = jnp.zeros(like.shape, bits), jnp.full(like.shape, end, bits)

    def halve(_: Int[Array, ""] | int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        ok = holds(lax.bitcast_convert_type(middle, dtype))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low, _ = lax.fori_loop(0, end.bit_length(), halve, (low, high))
    return lax.bitcast_convert_type(low, dtype)


def _check_numbers(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    for name, value, good, wanted in (
        ("temperature", temperature, lambda t: t >= 0, "0 (greedy) or more"),
        ("top_k", top_k, lambda k: k >= 0, "0 (off) or more"),
        ("top_p", top_p, lambda p: 0 < p <= 1, "in (0, 1]; 1 is off"),
        ("min_p", min_p, lambda p: 0 <= p <= 1, "in [0, 1]; 0 is off"),
    ):
        if isinstance(value, float | int) and not good(value):
            raise ValueError(f"{name}={value!r}: it must be {wanted}")
