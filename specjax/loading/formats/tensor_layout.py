"""Convert tensors between a checkpoint's layout and the parameter tree's.

Files have kernels as rows [out, in], possibly transposed or joined in one tensor, and rotary halves
possibly interleaved in pairs; the tree has kernels [in..., out...] and half-split rotary
dimensions. `parameter_names.TensorEntry` says which of these apply to a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from specjax.errors import InputError
from specjax.loading.formats.parameter_names import Location, TensorEntry, locations, lookup
from specjax.models.config import DecoderConfig


def from_stored(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return the tree's array of a tensor in the file's layout; a view if possible."""
    if location.entry.transposed:
        stored = stored.T
    index, count = location.entry.part
    size = len(stored) // count
    return from_rows(stored[index * size : (index + 1) * size], location)


def from_rows(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return the tree's array of one location, from its own rows of the file's tensor.

    Rows of a kernel are [out, in].
    """
    entry = location.entry
    stored = stored.reshape(location.rows)
    if entry.paired:
        stored = unpaired(stored, location)
    if entry.added:
        stored = stored - np.asarray(entry.added, stored.dtype)
    return (stored.T if entry.in_axes else stored).reshape(location.shape)


def stored_view(value: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return a view of the tree's array with the axes of the file's rows, half-split."""
    rows, *rest = location.rows
    return value.reshape(*rest, rows).T if location.entry.in_axes else value.reshape(rows, *rest)


def to_stored(value: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return the file's array of one part, the inverse of `from_stored`; `_joined` joins parts."""
    entry = location.entry
    stored = stored_view(value, location)
    if entry.paired:
        stored = _pair(stored, location)
    if entry.added:
        stored = stored + np.asarray(entry.added, stored.dtype)
    return stored.T if entry.transposed else stored


def stored_tensors(
    table: Iterable[TensorEntry], config: DecoderConfig, params: dict[str, Any]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Return a model's parameters with the names and in the layouts of a table.

    Raises InputError for parameters whose shape does not match the config.
    """
    parts: dict[str, list[tuple[Location, np.ndarray]]] = {}
    scan_layers = "0" not in params["layers"]
    for location in locations(table, config):
        keys, index = location.within(scan_layers)
        value = np.asarray(lookup(params, keys))[index]
        if value.size != math.prod(location.shape):
            raise InputError(
                f"{location.name}: the parameter has shape {list(value.shape)}, "
                f"the config says {list(location.shape)}"
            )
        parts.setdefault(location.name, []).append((location, to_stored(value, location)))
    return {name: _joined(entries) for name, entries in parts.items()}


def _joined(entries: Sequence[tuple[Location, np.ndarray]]) -> np.ndarray:
    """Return a file's tensor from its parts, which follow each other along the outputs."""
    ordered = sorted(entries, key=lambda pair: pair[0].entry.part)
    axis = -1 if ordered[0][0].entry.transposed else 0
    joined = np.concatenate([part for _, part in ordered], axis=axis)
    return np.ascontiguousarray(joined.reshape(ordered[0][0].stored_shape))


def same_numbers(one: np.ndarray, other: np.ndarray, rows: int | None = None) -> bool:
    """Return whether two arrays, or their first `rows`, agree in the coarser of their dtypes."""
    one, other = one[:rows], other[:rows]
    if one.shape != other.shape:
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(
            one.astype(other.dtype).astype(np.float32),
            other.astype(one.dtype).astype(other.dtype).astype(np.float32),
        )


def unpaired(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return each head's rows in half-split order: stored rows 0, 2, ..., then 1, 3, ...

    In the file, rows 0 and 1, 2 and 3, ... form the rotated pairs.
    """
    return _reordered(stored, location, lambda width: np.arange(width).reshape(-1, 2).T)


def _pair(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    return _reordered(stored, location, lambda width: np.arange(width).reshape(2, -1).T)


def _reordered(
    stored: Shaped[np.ndarray, "..."],
    location: Location,
    order: Callable[[int], np.ndarray],
) -> Shaped[np.ndarray, "..."]:
    """Return the rows of each head, the rotated ones in another order."""
    width, rotated = location.shape[-1], location.rotary_width
    rows = np.concatenate([order(rotated).reshape(-1), np.arange(rotated, width)])
    heads = stored.reshape(-1, width, *stored.shape[1:])
    return heads[:, rows].reshape(stored.shape)
