"""Which tokens a draft's logits stand for: those that the target writes most often."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Int64

from specjax.errors import InputError
from specjax.models.vocabulary import most_frequent
from train.batches import Source


def count_labels(data: Source, chosen: np.ndarray, vocab_size: int) -> Int64[np.ndarray, "V"]:
    """How often each token is a label in the chosen conversations; reads them all once."""
    counts = np.zeros(vocab_size, np.int64)
    for index in chosen:
        example = data[int(index)]
        counts += np.bincount(example.tokens[example.loss_mask], minlength=vocab_size)
    return counts


def draft_vocabulary(
    data: Source, chosen: np.ndarray, size: int | None, vocab_size: int
) -> Int32[np.ndarray, "Vd"] | None:
    """The `size` commonest tokens among labels, ascending; None for all (size None or V).

    Raises InputError for a size out of range.
    """
    if size is None or size == vocab_size:
        return None
    if not 1 <= size < vocab_size:
        raise InputError(
            f"draft_vocab_size={size}: must lie in 1..{vocab_size}, the target's vocabulary"
        )
    return most_frequent(count_labels(data, chosen, vocab_size), size)
