"""Checks of a drafter's weights without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from specjax.loading.compare_arrays import leaf_name
from specjax.methods.heads.examined import Examined


def weight_notes(drafter: Examined, params: Any) -> Iterator[str]:
    """Yield a line for each array of a head that training cannot have left as it is.

    These are norms whose scale is exactly 1, arrays of zeros, and arrays with numbers that are not
    finite.
    """
    for path, leaf in jax.tree.leaves_with_path(drafter.own_params(params)):
        name, values = leaf_name(path), np.asarray(leaf)
        if values.dtype.kind in "iu":
            continue
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            yield f"{name}: holds numbers that are not finite; export the head again"
        elif name.endswith("scale") and (values == 1).all():
            yield f"{name}: exactly 1 everywhere, so not trained or not loaded"
        elif not values.any() and not name.endswith("bias"):
            yield f"{name}: 0 everywhere, so not trained or not loaded"
