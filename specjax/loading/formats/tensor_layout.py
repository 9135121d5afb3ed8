"""Conversion of tensors between a checkpoint's layout and the parameter tree's.

Files have kernels as rows [out, in] or transposed, joined in other ways than in the tree, and some
have rotary dimensions in adjacent pairs. The tree has kernels [in, out] with rotary dimensions in
two halves. A tensor's `parameter_names.TensorEntry` says which of these apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from specjax.errors import InputError
from specjax.loading.formats.parameter_names import Location, TensorEntry, locations, lookup
from specjax.models.config import DecoderConfig


def own_rows(
    location: Location, rows: slice = slice(None), inputs: slice = slice(None)
) -> tuple[int | slice, ...]:
    """Return the index, in the file's tensor, of some rows and inputs of a location.

    Of interleaved parts it selects the same rows of all.
    """
    entry, before = location.entry, location.before
    first, stop, _ = rows.indices(location.rows[0])
    stored_rows = slice(before + first, before + stop)
    if entry.interleaved:
        stored_rows = slice(first * len(entry.fused), stop * len(entry.fused))
    index: tuple[int | slice, ...] = (stored_rows, inputs)[: len(location.rows)]
    if entry.transposed:
        index = index[::-1]
    if location.merged:
        assert location.expert is not None
        return (location.expert, *index)
    return index


def _as_rows(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return a view of what `own_rows` selects, with the location's rows first and no others."""
    entry = location.entry
    if entry.transposed:
        stored = stored.T
    if entry.interleaved:
        return stored[entry.fused.index(entry.path[-2]) :: len(entry.fused)]
    return stored


def order_in_file(location: Location) -> Int[np.ndarray, " N"] | None:
    """Return where a file has each row of a location, or each input of an output kernel.

    It is None if they are in the tree's order. Positions count from the first of the location's.
    """
    if location.apart is None:
        return None
    keys, shared = location.apart
    heads = (np.arange(keys)[:, None] + keys * np.arange(shared)).reshape(-1, 1)
    width = location.rows[_is_output(location)] // len(heads)
    return (heads * width + np.arange(width)).reshape(-1)


def _is_output(location: Location) -> bool:
    """Return whether value heads are the inputs of a location's kernel, instead of its rows."""
    return location.entry.path[-2] == "output"


def read_in_order(
    location: Location, rows: slice, read: Callable[[slice], Shaped[np.ndarray, "..."]]
) -> Shaped[np.ndarray, "..."]:
    """Return rows of a location in the tree's order, given a function of rows in the file's.

    `read` takes rows of the location as the file has them, and returns whole rows.
    """
    order = order_in_file(location)
    if order is None:
        return read(rows)
    if _is_output(location):
        return read(rows)[:, order]
    wanted = order[rows]
    starts = np.append(0, np.flatnonzero(np.diff(wanted) != 1) + 1)
    ends = [*starts[1:], len(wanted)]
    runs = [wanted[start:end] for start, end in zip(starts, ends, strict=True)]
    return np.concatenate([read(slice(int(run[0]), int(run[-1]) + 1)) for run in runs])


def from_stored(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return rows of a location in the tree's layout, given the same rows in the file's layout.

    For a kernel the result is [out, in]. If rotary dimensions are reordered, `stored` must consist
    of whole heads.
    """
    entry, stored = location.entry, _as_rows(stored, location)
    if entry.paired:
        stored = unpaired(stored, location)
    if entry.decay:
        return np.log(-stored)
    return stored - np.asarray(entry.added, stored.dtype) if entry.added else stored


def to_stored(leaf: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return a location's rows, in the file's order, given the leaf that has them.

    `_joined` puts them where the file's tensor has them.
    """
    entry = location.entry
    rows = location.section.of(leaf.T if location.is_kernel else leaf)
    stored = rows.reshape(location.rows)
    if entry.paired:
        stored = _pair(stored, location)
    if (order := order_in_file(location)) is not None:
        inverse = np.argsort(order)
        stored = stored[:, inverse] if _is_output(location) else stored[inverse]
    if entry.decay:
        stored = -np.exp(stored)
    if entry.added:
        stored = stored + np.asarray(entry.added, stored.dtype)
    return stored


def stored_tensors(
    table: Iterable[TensorEntry], config: DecoderConfig, params: dict[str, Any]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Return a model's parameters by the names, and in the layouts, of a table.

    Raises InputError for parameters whose shape does not match the config.
    """
    parts: dict[str, list[tuple[Location, np.ndarray]]] = {}
    scan_layers = "0" not in params.get("layers", {})
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
    """Return a file's tensor, given the rows of all its parts."""
    dtype = np.result_type(*(rows.dtype for _, rows in entries))
    joined = np.empty(entries[0][0].stored_shape, dtype)
    for location, rows in entries:
        _as_rows(joined[own_rows(location)], location)[...] = rows
    return joined


def same_numbers(first: np.ndarray, second: np.ndarray, rows: int | None = None) -> bool:
    """Return whether two arrays are equal after rounding to the coarser of their dtypes.

    If `rows` is given, only that many leading rows are compared.
    """
    first, second = first[:rows], second[:rows]
    if first.shape != second.shape:
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(
            first.astype(second.dtype).astype(np.float32),
            second.astype(first.dtype).astype(second.dtype).astype(np.float32),
        )


def unpaired(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """Return rows in half-split order within each head: stored rows 0, 2, ..., then 1, 3, ...

    In the file, rows 0 and 1, 2 and 3, ... form the rotated pairs. `location` has the widths of a
    head and of its rotated part.
    """
    return _reordered(stored, location, lambda width: np.arange(width).reshape(-1, 2).T)


def _pair(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    return _reordered(stored, location, lambda width: np.arange(width).reshape(2, -1).T)


def _reordered(
    stored: Shaped[np.ndarray, "..."],
    location: Location,
    order: Callable[[int], np.ndarray],
) -> Shaped[np.ndarray, "..."]:
    """Return the rows with the rotated ones of each head permuted by `order(rotary_width)`."""
    width, rotated = location.head_dim, location.rotary_width
    rows = np.concatenate([order(rotated).reshape(-1), np.arange(rotated, width)])
    heads = stored.reshape(-1, width, *stored.shape[1:])
    return heads[:, rows].reshape(stored.shape)
