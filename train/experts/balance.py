"""Load balancing of experts without a loss (Wang et al. 2408.15664, DeepSeek-V3 2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.loading.compare_arrays import leaf_name
from train.experts.loads import Loads


def balanced(params: Any, loads: Loads, rate: float) -> Any:
    """Return the parameters with the routers' selection biases adjusted to the loads of an update.

    `loads` are the numbers of tokens by router and expert. The bias of an expert rises by `rate` if
    its load was below the mean of its layer, and falls by `rate` if it was above. Routers without
    selection biases are unchanged.
    """

    def moved(path: tuple, leaf: jax.Array) -> jax.Array:
        router, _, last = leaf_name(path).rpartition(".")
        if last != "selection_bias" or router not in loads:
            return leaf
        load = loads[router]
        return leaf + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)

    return jax.tree_util.tree_map_with_path(moved, params) if rate and loads else params


def imbalance(loads: Mapping[str, Any]) -> float | None:
    """Return the largest load of a layer divided by its mean, averaged over layers.

    It is 1 if all experts of a layer had the same load. Layers without tokens are omitted; without
    experts the result is None.
    """
    layers = [layer for load in loads.values() for layer in np.atleast_2d(np.asarray(load))]
    ratios = [layer.max() / layer.mean() for layer in layers if layer.any()]
    return float(np.mean(ratios)) if ratios else None
