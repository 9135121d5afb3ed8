"""Convert tensors between a checkpoint's layout and the parameter tree's.

Files have kernels as rows [out, in], joined in other ways than the tree's, transposed ones, and
rotary halves interleaved, pair by pair; the tree has kernels [in, out] and halves one after the
other. Which of these a tensor has, its `parameter_names.TensorEntry` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from specjax.errors import InputError
from specjax.loading.formats.parameter_names import Location, TensorEntry, locations, lookup
from specjax.models.config import DecoderConfig


def own_rows(
    location: Location, rows: slice = slice(None), inputs: slice = slice(None)
) -> tuple[int | slice, ...]:
    """Return the index in the file's tensor of some rows of a location, and of some inputs."""
    number, _ = location.entry.part
    first, stop, _ = rows.indices(location.rows[0])
    if location.entry.merged:
        return (number, slice(first, stop), inputs)
    before = number * location.rows[0]
    own = slice(before + first, before + stop)
    if location.entry.transposed:
        return (inputs, own)
    return (own, inputs)[: len(location.rows)]


def from_stored(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return a location's rows as the tree has them, from those of the file (`own_rows`).

    Of a kernel they are [out, in]. Whole heads where rows are reordered.
    """
    entry = location.entry
    if entry.transposed:
        stored = stored.T
    if entry.paired:
        stored = unpaired(stored, location)
    return stored - np.asarray(entry.added, stored.dtype) if entry.added else stored


def to_stored(leaf: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return a location's rows as the file has them, from its leaf; `_joined` joins parts."""
    entry = location.entry
    rows = location.section.of(leaf.T if location.is_kernel else leaf)
    stored = rows.reshape(location.rows)
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
        leaf = np.asarray(lookup(params, keys))[index]
        if leaf.shape != location.leaf_shape:
            raise InputError(
                f"{location.name}: the parameter has shape {list(leaf.shape)}, "
                f"the config says {list(location.leaf_shape)}"
            )
        parts.setdefault(location.name, []).append((location, to_stored(leaf, location)))
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
    width, rotated = location.head_dim, location.rotary_width
    rows = np.concatenate([order(rotated).reshape(-1), np.arange(rotated, width)])
    heads = stored.reshape(-1, width, *stored.shape[1:])
    return heads[:, rows].reshape(stored.shape)
