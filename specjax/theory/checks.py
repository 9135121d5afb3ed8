"""Checks of theory's arguments, which are scalars or numpy arrays."""

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
    """`value` in float64, finite and in [low, high] (`above`: in (low, high]), else InputError."""
    array = np.asarray(value, np.float64)
    fine = np.isfinite(array) & (array <= high) & ((array > low) if above else (array >= low))
    if not fine.all():
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else ""
        raise InputError(f"{name} = {array[~fine].flat[0]:g}: give a finite number {bounds}")
    return array


def checked_count(name: str, value: Count, least: int) -> int | Int[np.ndarray, "..."]:
    """`value` as int, or an int64 array, if all of it is whole and at least `least`, else error."""
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} = {value}: give a whole number of at least {least}")
    if (array < least).any():
        raise InputError(f"{name} = {array.min()}: give a whole number of at least {least}")
    return array.astype(np.int64) if array.ndim else int(array)


def unwrap(array: np.ndarray | float) -> Result:
    """A float for a single number, the array otherwise."""
    return array if np.ndim(array) else float(array)
