"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from specjax.core.draft_vocabulary import most_frequent
from specjax.distributed import processes
from specjax.errors import InputError
from train.data.combined_datasets import Sources
from train.data.responses import Responses

COUNTS = "token_counts.npy"
"""The file beside a dataset's records that caches token counts, which are slow to compute."""

Vocabulary = Callable[[int | None], Int32[np.ndarray, "Vd"] | None]
"""A function from a size to the ids of a draft vocabulary; None for all tokens (size None or V)."""


def draft_vocabulary(
    data: Sources | Responses, size: int | None, vocab_size: int
) -> Int32[np.ndarray, "Vd"] | None:
    """Return the ids of the `size` most common tokens among labels, in ascending order.

    Held-out conversations are not counted. Returns None, which stands for all tokens, if `size` is
    None or `vocab_size`. Raises InputError for a size out of range.
    """
    if size is None or size == vocab_size:
        return None
    if not 1 <= size < vocab_size:
        raise InputError(
            f"draft_vocab_size={size}: must be in 1..{vocab_size}, the target's vocabulary"
        )
    return most_frequent(count_labels(data, vocab_size), size)


def count_labels(data: Sources | Responses, vocab_size: int) -> Int64[np.ndarray, "V"]:
    """Return, for each token id, how often it is a label in the training conversations.

    The counts of a dataset are cached in its directory, if that is writable.
    """
    parts = data.parts if isinstance(data, Sources) else (data,)
    return sum(_counts_of(part, vocab_size) for part in parts)


def _counts_of(part: Responses, vocab_size: int) -> Int64[np.ndarray, "V"]:
    file = part.directory / COUNTS
    with suppress(OSError, ValueError, EOFError):
        counts = np.load(file, allow_pickle=False)
        if counts.dtype == np.int64 and counts.shape == (vocab_size,):
            return counts
    counts = np.zeros(vocab_size, np.int64)
    for index in np.flatnonzero(~part.validation):
        example = part[int(index)]
        counts += np.bincount(example.tokens[example.loss_mask], minlength=vocab_size)
    if processes.is_first():
        _keep(file, counts)
    return counts


def _keep(file: Path, counts: Int64[np.ndarray, "V"]) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError):
        with beside.open("wb") as stream:
            np.save(stream, counts)
        os.replace(beside, file)
    with suppress(OSError):
        beside.unlink()
