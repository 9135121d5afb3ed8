"""Draft logits over part of the vocabulary (FR-Spec: Zhao et al. 2502.14856; EAGLE-3's d2t).

The draft's probability of all other tokens is zero, so that every rule stays exact.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.errors import InputError


def expand(
    logits: Float[Array, "*rows Vd"], draft_ids: Int[Array, "Vd"] | None, vocab_size: int
) -> Float[Array, "*rows V"]:
    """Return logits over the whole vocabulary, which are -inf outside the draft vocabulary.

    `draft_ids` are the token ids of `logits`; with None the logits are returned unchanged.
    """
    if draft_ids is None:
        return logits
    expanded = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return expanded.at[..., draft_ids].set(logits, unique_indices=True, indices_are_sorted=True)


def check_draft_vocab_size(size: int, vocab_size: int) -> None:
    """Raise InputError unless `size`, that of a draft vocabulary, is from 1 to `vocab_size`."""
    if not 1 <= size <= vocab_size:
        raise InputError(
            f"draft_vocab_size={size}: must be in 1..{vocab_size}, the target's vocabulary"
        )


def check_draft_ids(draft_ids: np.ndarray, vocab_size: int) -> None:
    """Raise InputError unless `draft_ids` are ascending token ids below `vocab_size`."""
    ids = np.asarray(draft_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise InputError(
            f"draft vocabulary: {ids.dtype}{list(ids.shape)} is not a list of ids; export it again"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        invalid_id = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InputError(
            f"draft vocabulary: token id {invalid_id} is not in 0..{vocab_size - 1}; use a head "
            "that was trained for this target"
        )
    if (np.diff(ids) <= 0).any():
        index = int(np.argmax(np.diff(ids) <= 0))
        raise InputError(
            f"draft vocabulary: ids must ascend, and {ids[index + 1]} follows {ids[index]}; "
            "export it again"
        )


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the `size` token ids with the highest counts, in ascending order.

    `counts` [V] has the count of each token id. Of equal counts, that of the lower id is chosen.
    """
    order = np.argsort(-counts, kind="stable")[:size]
    return np.sort(order).astype(np.int32)
