"""Check the arguments of `specjax.theory`, which are scalars or NumPy arrays."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from specjax.errors import InputError

Real = float | int | np.number | Float[np.ndarray, "..."] | Int[np.ndarray, "..."]
Count = int | np.integer | Int[np.ndarray, "..."]
Result = float | Float[np.ndarray, "..."]


def checked(
    name: str, value: Real, low: float = 0.0, high: float = math.inf, *, above: bool = False
) -> Float[np.ndarray, "..."]:
    """Return `value` in float64; raise InputError unless it is finite and in [low, high].

    With `above`, the range is (low, high].
    """
    array = np.asarray(value, np.float64)
    is_valid = np.isfinite(array) & (array <= high) & ((array > low) if above else (array >= low))
    if not is_valid.all():
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else ""
        raise InputError(f"{name} = {array[~is_valid].flat[0]:g}: give a finite number {bounds}")
    return array


def checked_count(name: str, value: Count, least: int) -> int | Int[np.ndarray, "..."]:
    """Return `value` as int or int64; raise InputError unless whole and at least `least`."""
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} = {value}: give a whole number of at least {least}")
    if (array < least).any():
        raise InputError(f"{name} = {array.min()}: give a whole number of at least {least}")
    return array.astype(np.int64) if array.ndim else int(array)


def unwrap(array: np.ndarray | float) -> Result:
    """Return a float for a 0-d array, and any other array unchanged."""
    return array if np.ndim(array) else float(array)
