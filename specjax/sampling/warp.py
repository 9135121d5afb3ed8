"""From logits to the distribution to sample from: temperature, top-k, top-p, min-p."""

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
"""The number of values per block in `top_k`: the lanes of a TPU register."""


@dataclass(frozen=True)
class WarpFlags:
    """Which sampling parameters at least one row uses; code for the others is not compiled.

    `greedy` means that some row has temperature 0, `sampled` that some row has another one. A flag
    that is needlessly True costs time; one that is wrongly False gives wrong distributions, so
    create flags with `of`.
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
        """Return the flags for these sampling parameters, each a number or one number per row.

        A parameter that is a JAX array, whose values may not be known yet, sets its flags.
        """

        def any_row(value: Any, needs: Callable[[Any], Any]) -> bool:
            # Reading a device array here would make the host wait for it.
            return not isinstance(value, np.ndarray | float | int) or bool(np.any(needs(value)))

        return cls(
            greedy=any_row(temperature, lambda t: t <= 0),
            sampled=any_row(temperature, lambda t: t > 0),
            top_k=any_row(top_k, lambda k: k > 0),
            top_p=any_row(top_p, lambda p: p < 1),
            min_p=any_row(min_p, lambda p: p > 0),
        )

    def union(self, other: WarpFlags) -> WarpFlags:
        """Return flags that suffice for a batch with these flags and for one with `other`."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return WarpFlags(*(flag or other_flag for flag, other_flag in pairs))


def warp(
    logits: Float[Array | np.ndarray, "*rows V"],
    temperature: Parameter,
    top_k: Parameter = 0,
    top_p: Parameter = 1.0,
    min_p: Parameter = 0.0,
    *,
    flags: WarpFlags | None = None,
) -> Float[Array, "*rows V"]:
    """Return the log-probabilities of `logits` under the sampling parameters.

    The parameters apply in the order temperature, top-k, top-p, min-p, each to the tokens kept by
    the previous one, and each is a number or an array with one entry per row. With `temperature` 0
    (greedy) the result is 0.0 at the first argmax and -inf elsewhere, whatever the other
    parameters. `top_k` 0, `top_p` 1 and `min_p` 0 mean off. top-k keeps the k largest values, top-p
    the smallest set of most likely tokens whose mass reaches `top_p`, min-p the tokens with at
    least `min_p` times the largest probability. Tokens tied at a threshold are all kept.

    Half precision is computed in float32. A row without a finite logit stays -inf. `flags` say
    which parameters to compile, and are derived from the parameters if None. Raises ValueError for
    values out of range and for arrays that do not match the rows.
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

    temperature_column = column("temperature", temperature, logits.dtype)
    # Shifting before dividing keeps the largest at exactly 0 for any temperature, however small.
    shifted = logits - jnp.where(largest > -jnp.inf, largest, 0)
    scores = shifted / jnp.where(temperature_column > 0, temperature_column, 1)
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
    return jnp.where(temperature_column > 0, logp, _greedy(logits, largest))


def argmax(
    values: Real[Array, "*rows V"], largest: Real[Array, "*rows 1"] | None = None
) -> Int[Array, "*rows"]:
    """Return the first index of the largest value along the last axis, as int32.

    `largest` are the largest values, if already known. On CPU this is twice as fast as
    `jnp.argmax`.
    """
    return _first(values, jnp.max(values, axis=-1, keepdims=True) if largest is None else largest)


def top_k(
    values: Float[Array, "*rows V"], count: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Return the `count` largest values and their indices, as `lax.top_k` does.

    Equal values come in the order of their indices. Since the largest values are in the blocks with
    the largest maxima, only the block maxima and `count` blocks are sorted. (On TPU, `lax.top_k`
    sorts a copy of everything.)
    """
    *rows, vocab = values.shape
    blocks = -(-vocab // _BLOCK)
    if not 0 < count * 2 <= blocks:
        return tuple(lax.top_k(values, count))
    # Windows and slices, since a reshape into blocks is another layout, and so a copy, on TPUs.
    window = (*[1] * len(rows), _BLOCK)
    padding = (*[(0, 0)] * len(rows), (0, blocks * _BLOCK - vocab))
    maxima = lax.reduce_window(values, -jnp.inf, lax.max, window, window, padding)
    # In the order of their positions, so that of equal values the first is found.
    block_starts = _BLOCK * jnp.sort(lax.top_k(maxima, count)[1], axis=-1)
    slice_starts = jnp.minimum(block_starts, vocab - _BLOCK)
    block_values = _blocks_of(values, slice_starts)
    positions = slice_starts[..., None] + lax.broadcasted_iota(
        slice_starts.dtype, block_values.shape, block_values.ndim - 1
    )
    # The slice of the shorter last block begins in the block before it.
    block_values = jnp.where(positions >= block_starts[..., None], block_values, -jnp.inf)
    best_values, best_index = lax.top_k(block_values.reshape(*rows, -1), count)
    return best_values, jnp.take_along_axis(positions.reshape(*rows, -1), best_index, axis=-1)


@partial(jnp.vectorize, signature="(v),(k)->(k,b)")
def _blocks_of(row: Float[Array, "V"], starts: Int[Array, " k"]) -> Float[Array, "k block"]:
    """Return the `_BLOCK` consecutive entries of a row that begin at each of `starts`."""
    take = partial(lax.dynamic_slice_in_dim, row, slice_size=_BLOCK)
    return jax.vmap(take)(starts)


def _first(values: Real[Array, "*rows V"], largest: Real[Array, "*rows 1"]) -> Int[Array, "*rows"]:
    vocab = values.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    # Without a match (NaN), return the last token rather than an index past the end.
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
    """Return which tokens are among the k with the highest scores, including ties.

    `depths` are the distances of the scores below the largest one.
    """
    depths = jnp.abs(depths)  # -0.0 has the bits of a negative number
    k_by_row = jnp.where(top_k > 0, top_k, depths.shape[-1])
    largest_depth = _last_float(
        lambda limit: (depths < limit).astype(jnp.int32),
        lambda tokens_below: tokens_below < k_by_row,
        depths[..., :1],
        top=jnp.inf,
        needed=top_k > 0,
    )
    return depths <= jnp.where(top_k > 0, largest_depth, jnp.inf)


def _in_top_p(
    weights: Float[Array, "*rows V"], top_p: Float[Array, "*rows 1"]
) -> Bool[Array, "*rows V"]:
    """Return a mask of the smallest set of most likely tokens whose mass is at least `top_p`.

    Tokens tied with the least likely one in the set are included.
    """
    wanted_mass = top_p * jnp.sum(weights, axis=-1, keepdims=True)
    smallest_weight = _last_float(
        lambda limit: jnp.where(weights >= limit, weights, 0),
        lambda mass: mass >= wanted_mass,
        weights[..., :1],
        top=1.0,
        needed=top_p < 1,
    )
    return weights >= jnp.where(top_p < 1, smallest_weight, 0)


def _last_float(
    contributions: Callable[[Float[Array, "*rows 1"]], Real[Array, "*rows V"]],
    holds: Callable[[Real[Array, "*rows 1"]], Bool[Array, "*rows 1"]],
    like: Float[Array, "*rows 1"],
    *,
    top: float,
    needed: Bool[Array, "*rows 1"],
) -> Float[Array, "*rows 1"]:
    """Return, for each row, the largest float in [0, top] at which a condition is true.

    The condition at a float x is `holds(sum over V of contributions(x))`. It is true at 0 and, once
    false, stays false. Non-negative floats are ordered as their bits are, so a search over the bits
    finds the float exactly, where a sort would cost twenty times as much on a CPU. A CPU finds one
    bit per pass over the vocabulary, and makes no pass unless some row needs the result (`needed`).
    An accelerator finds four bits per pass, by comparing fifteen floats at once, and always makes
    its eight passes, since a loop or branch that waits for data costs more there than arithmetic.
    """
    search = partial(_search_bits, contributions, holds, like, top)
    return lax.platform_dependent(
        needed,
        cpu=lambda needed: lax.cond(needed.any(), lambda: search(1), lambda: jnp.zeros_like(like)),
        default=lambda needed: search(4),
    )


def _search_bits(
    contributions: Callable[[Float[Array, "*rows 1"]], Real[Array, "*rows V"]],
    holds: Callable[[Real[Array, "*rows 1"]], Bool[Array, "*rows 1"]],
    like: Float[Array, "*rows 1"],
    top: float,
    bits_per_pass: int,
) -> Float[Array, "*rows 1"]:
    """Return the float that `_last_float` describes, `bits_per_pass` bits per pass."""
    integer = {4: np.int32, 8: np.int64}[like.dtype.itemsize]
    end = int(np.asarray(top, like.dtype).view(integer)) + 1
    num_bits = end.bit_length()

    def narrow(index: Int[Array, ""] | int, low: Int[Array, "*rows 1"]) -> Int[Array, "*rows 1"]:
        shift = jnp.maximum(num_bits - bits_per_pass * (index + 1), 0).astype(integer)
        candidates = [low + (integer(c) << shift) for c in range(1, 1 << bits_per_pass)]
        # One reduction of many operands reads the vocabulary once for all candidates.
        operands = tuple(contributions(lax.bitcast_convert_type(c, like.dtype)) for c in candidates)
        zeros = tuple(operand.dtype.type(0) for operand in operands)
        sums = lax.reduce(operands, zeros, _add_each, (like.ndim - 1,))
        true_at = [
            (c < end) & holds(total[..., None]) for c, total in zip(candidates, sums, strict=True)
        ]
        return low + (sum(each.astype(integer) for each in true_at) << shift)

    low = jnp.zeros(like.shape, integer)
    low = lax.fori_loop(0, -(-num_bits // bits_per_pass), narrow, low)
    return lax.bitcast_convert_type(low, like.dtype)


def _add_each(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _check_numbers(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    for name, value, is_valid, remedy in (
        ("temperature", temperature, lambda t: t >= 0, "0 (greedy) or more"),
        ("top_k", top_k, lambda k: k >= 0, "0 (off) or more"),
        ("top_p", top_p, lambda p: 0 < p <= 1, "in (0, 1]; 1 is off"),
        ("min_p", min_p, lambda p: 0 <= p <= 1, "in [0, 1]; 0 is off"),
    ):
        if isinstance(value, float | int) and not is_valid(value):
            raise ValueError(f"{name}={value!r}: it must be {remedy}")
