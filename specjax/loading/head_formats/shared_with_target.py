"""The arrays that a head shares with its target: the embedding, and columns of the output head."""

from __future__ import annotations

import numpy as np

from specjax.loading.model import Model
from specjax.loading.quantize import float_kernel


def target_embedding(target: Model) -> np.ndarray:
    """Return the target's embedding [V, D]."""
    if "embed" in target.params:
        return np.asarray(target.params["embed"]["embedding"])
    return target_head(target)


def target_head(target: Model) -> np.ndarray:
    """Return the target's output head [V, D], the layout in which other tools store it."""
    return np.asarray(float_kernel(target.params["head"]["kernel"])).T
