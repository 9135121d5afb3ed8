"""Checks of the arguments of `specjax.theory`, which are scalars or NumPy arrays."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from specjax.errors import InputError, shown

Real = float | int | np.number | Float[np.ndarray, "..."] | Int[np.ndarray, "..."]
Count = int | np.integer | Int[np.ndarray, "..."]
Result = float | Float[np.ndarray, "..."]


def checked(
    name: str, value: Real, low: float = 0.0, high: float = math.inf, *, above: bool = False
) -> Float[np.ndarray, "..."]:
    """Return `value` in float64; raise InputError unless it is finite and in [low, high].

    With `above`, the range is (low, high].
    """
    array = _numbers(name, value).astype(np.float64)
    is_valid = np.isfinite(array) & (array <= high) & ((array > low) if above else (array >= low))
    if not is_valid.all():
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        bounds += f" and at most {high:g}" if math.isfinite(high) else ""
        raise InputError(f"{name} = {array[~is_valid].flat[0]:g}: give a finite number {bounds}")
    return array


def checked_count(name: str, value: Count, least: int) -> int | Int[np.ndarray, "..."]:
    """Return `value` as int or int64; raise InputError unless whole and at least `least`."""
    array = _numbers(name, value)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(f"{name} = {value}: give a whole number of at least {least}")
    if (array < least).any():
        raise InputError(f"{name} = {array.min()}: give a whole number of at least {least}")
    return array.astype(np.int64) if array.ndim else int(array)


def check_broadcast(**arguments: object) -> None:
    """Raise InputError naming the first argument whose shape does not broadcast with the others.

    Arguments that are neither numbers nor arrays, such as None or a function, count as scalars.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in arguments.items():
        is_array = hasattr(value, "shape") or isinstance(value, list | tuple)
        shape = _numbers(name, value).shape if is_array else ()
        try:
            np.broadcast_shapes(shape, *shapes.values())
        except ValueError:
            others = " and ".join(f"{other} {other_shape}" for other, other_shape in shapes.items())
            raise InputError(
                f"{name} has shape {shape}, which does not broadcast with {others}: give shapes "
                f"such as {name}[:, None], one axis for each argument that varies"
            ) from None
        if shape:
            shapes[name] = shape


def _numbers(name: str, value: object) -> np.ndarray:
    """Return `value` as an array; raise InputError unless its elements are real numbers."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name}: its rows have different lengths; give an array") from None
    if array.dtype.kind in "bcmMOSTU":
        raise InputError(f"{name} = {shown(value)}: give a number, or a NumPy array of numbers")
    return array


def unwrap(array: np.ndarray | float) -> Result:
    """Return a 0-d array as a float, and any other array unchanged."""
    return array if np.ndim(array) else float(array)
