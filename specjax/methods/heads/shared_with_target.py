"""The arrays that a head shares with its target: the embedding, and columns of the output head.

Files of other tools hold copies of them, which are compared and not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.model import Model
from specjax.loading.quantize import float_kernel, is_quantized
from specjax.loading.user_messages import note

_MOST_ROUNDING = 0.25
"""The largest difference of a row, as a part of its size, that rounding explains.

Rounding a group of weights to 4 bits changes it by 0.22 at most, usually by 0.08. Rows of another
model, or of other tokens, differ by some 1.4.
"""
_ROWS = 4096
"""The number of rows that are compared at once."""


def target_embedding(target: Model) -> np.ndarray:
    """Return the target's embedding [V, D]."""
    if "embed" in target.params:
        table = target.params["embed"]["embedding"]
        return np.asarray(float_kernel(table)).T if is_quantized(table) else np.asarray(table)
    return target_head(target)


def target_head(target: Model, draft_ids: np.ndarray | None = None) -> np.ndarray:
    """Return the target's output head, or its rows for some tokens, as other tools store it.

    It is [V, D] or, with `draft_ids`, [Vd, D].
    """
    rows = np.asarray(float_kernel(target.params["head"]["kernel"])).T
    return rows if draft_ids is None else rows[draft_ids]


def check_copy(
    where: Path, name: str, copy: np.ndarray, own: np.ndarray, target: Model, used_by: str
) -> None:
    """Compare a file's `copy` of an array with the target's `own`, which is used in its place.

    `where` is the directory of the head, `name` that of the tensor. The copy may be rounded, or the
    target (to few bits, or in a quantized file): a line says so. Raises InputError, which says that
    the array is `used_by` the head, for any larger difference.
    """
    if tensor_layout.same_numbers(copy, own):
        return
    difference = np.inf if copy.shape != own.shape else _largest_difference(copy, own)
    if not difference <= _MOST_ROUNDING:
        raise InputError(
            f"{where}: {name} differs from that of {target.name}, which {used_by}; use the target "
            "that the head was made for"
        )
    note(
        f"{where}: {name} is that of {target.name} up to rounding (by {difference:.1%} at most), "
        "and the target's is used"
    )


def _largest_difference(copy: np.ndarray, own: np.ndarray) -> float:
    """Return the largest difference between rows of two arrays, as a part of the row's size."""
    largest = 0.0
    for first in range(0, len(own), _ROWS):
        ours = own[first : first + _ROWS].astype(np.float32)
        sizes = np.linalg.norm(ours, axis=1)
        differences = np.linalg.norm(copy[first : first + _ROWS].astype(np.float32) - ours, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = np.where(differences == 0, 0, differences / sizes)
        largest = max(largest, float(parts.max()))
    return largest
