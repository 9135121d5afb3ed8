"""What a head shares with its target: the embedding, and columns of the target's head."""

from __future__ import annotations

import numpy as np

from specjax.loading.model import Model


def target_embedding(target: Model) -> np.ndarray:
    """The target's embedding [V, D]."""
    if "embed" in target.params:
        return np.asarray(target.params["embed"]["embedding"])
    return target_head(target)


def target_head(target: Model) -> np.ndarray:
    """The target's head as other tools store it [V, D]."""
    return np.asarray(target.params["head"]["kernel"]).T


def same_numbers(stored: np.ndarray, own: np.ndarray) -> bool:
    """Whether two arrays are equal in the coarser of their types."""
    if stored.shape != own.shape:
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(
            stored.astype(own.dtype).astype(np.float32),
            own.astype(stored.dtype).astype(own.dtype).astype(np.float32),
        )


def drop_padding(tensor: np.ndarray, stated: int, vocab_size: int) -> np.ndarray:
    """A tensor truncated to `vocab_size` rows if it has one for each of `stated` tokens."""
    if tensor.ndim and tensor.shape[0] == stated:
        return tensor[:vocab_size]
    return tensor
