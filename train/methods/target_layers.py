"""Copies of a target's layers, to initialize a draft, or to train the target itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.loading.model import Model
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import in_parts, with_joined
from specjax.models.parameter_table import attention_table


def some_layers(target: Model, layers: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of the given layers, stacked by run, and of the final norm.

    They are in float32, and those of a decoder with the config `some_layers`.
    """
    params = {"final_norm": target.params["final_norm"]}
    for run in target.config.some_layers(layers).runs:
        chosen = [layers[number] for number in run.layers]
        if target.form.stacked:
            theirs = next(one for one in target.config.runs if chosen[0] in one.layers)
            index = [theirs.layers.index(layer) for layer in chosen]
            stacked = target.params[theirs.name]
            params[run.name] = jax.tree.map(lambda leaf, at=index: np.asarray(leaf)[at], stacked)
        else:
            each = [target.params["layers"][str(layer)] for layer in chosen]
            params[run.name] = jax.tree.map(
                lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *each
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def in_float32(target: Model) -> Any:
    """Return all parameters of a model in float32, to be trained."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), target.params)


def with_params(target: Model, params: Any) -> Model:
    """Return the model with trained parameters, which are rounded to the dtypes of its own."""
    cast = jax.tree.map(lambda leaf, own: jnp.asarray(leaf, own.dtype), params, target.params)
    return dataclasses.replace(target, params=cast)


def last_layer(target: Model) -> dict[str, Any]:
    """Return the parameters of a model's last layer, in float32."""
    number = target.config.num_layers - 1
    last, (run,) = some_layers(target, [number]), target.config.some_layers([number]).runs
    return jax.tree.map(lambda leaf: leaf[0], last[run.name])


def with_kv_heads(qkv: dict[str, Any], config: DecoderConfig, num_kv_heads: int) -> dict[str, Any]:
    """Return the joined kernel of queries, keys and values with more key/value heads.

    `qkv` is that of a layer of `config`, whose key/value heads are repeated, so that attention
    computes the same. `num_kv_heads` is a multiple of their number that divides the query heads.
    """
    copies = num_kv_heads // config.num_kv_heads
    split = in_parts({"qkv": qkv}, config)
    for name in ("key", "value"):
        for kind, leaf in split[name].items():
            heads = leaf.reshape(*leaf.shape[:-1], -1, config.head_dim)
            split[name][kind] = jnp.repeat(heads, copies, axis=-2).reshape(*leaf.shape[:-1], -1)
    more = dataclasses.replace(config, num_kv_heads=num_kv_heads)
    table = {"qkv": attention_table(more, config.hidden_size)["qkv"]}
    return with_joined(split, table, more)["qkv"]
