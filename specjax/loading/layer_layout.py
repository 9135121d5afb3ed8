"""Conversion between stacked and separate parameters of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.models.config import DecoderConfig


def stack_layers(
    params: dict[str, Any], shardings: dict[str, Any], config: DecoderConfig
) -> dict[str, Any]:
    """Return parameters whose separate layers are stacked, into one array per run and name.

    `shardings` is a tree of the result's shardings. `params` is emptied meanwhile, to save memory.
    """
    layers = params.pop("layers")
    for run in config.runs:
        targets, tree = jax.tree.flatten(shardings[run.name])
        names = map(str, run.layers)
        rows = [jax.tree.leaves(layers.pop(name)) for name in names]
        stacked = []
        for target in targets:
            stack = jax.jit(lambda *parts: jnp.stack(parts), out_shardings=target)
            stacked.append(stack(*(row.pop(0) for row in rows)))
        params[run.name] = jax.tree.unflatten(tree, stacked)
    return params


def split_layers(
    params: dict[str, Any], shardings: dict[str, Any], config: DecoderConfig
) -> dict[str, Any]:
    """Return parameters whose stacked layers are separate, the inverse of `stack_layers`.

    `shardings` is a tree of the result's shardings.
    """
    layers: dict[str, Any] = {}
    for run in config.runs:
        leaves, tree = jax.tree.flatten(params.pop(run.name))
        names = [*map(str, run.layers)]
        rows: dict[str, list[jax.Array]] = {name: [] for name in names}
        for target in jax.tree.leaves(shardings["layers"][names[0]]):
            take = jax.jit(_layer, out_shardings=target)
            whole = leaves.pop(0)
            for index, row in enumerate(rows.values()):
                row.append(take(whole, np.int32(index)))
        layers |= {name: jax.tree.unflatten(tree, row) for name, row in rows.items()}
    return {**params, "layers": layers}


def _layer(whole: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(whole, index, keepdims=False)
