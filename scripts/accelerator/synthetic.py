"""Random weights and caches, made on the device: a large model would take minutes on the host."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.cache import KVCache
from specjax.loading.formats import parameter_names
from specjax.loading.formats.families import registry
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Form


def key(number: int) -> jax.Array:
    """A key of the backend's own generator, which compiles and draws faster than the default."""
    return jax.random.key(number, impl="rbg")


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "scale", "layers"))
def normal(
    seed: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    scale: float = 1.0,
    layers: int | None = None,
) -> jax.Array:
    """Normal numbers times `scale`; with `layers` that many arrays, stacked, drawn one by one."""

    def one(seed: jax.Array) -> jax.Array:
        return jax.random.normal(seed, shape, dtype) * jnp.asarray(scale, dtype)

    # Drawn one by one, so that the generator's own numbers never exist for the whole stack.
    return one(seed) if layers is None else lax.map(one, jax.random.split(seed, layers))


def random_model(name: str, config: DecoderConfig, dtype: str, form: Form) -> Model:
    """An untied model with random weights whose greedy continuation no rounding can change.

    Kernels are scaled by 1/sqrt(inputs). The head's column for token t + 1 is the embedding of t,
    so that after t comes t + 1 by a wide margin. In bfloat16 a pass over several tokens rounds
    differently from a pass over one token; with a random head the argmax would soon differ, and a
    recorded continuation would no longer match the one that is verified.
    """
    params: dict[str, Any] = {}
    one_layer = replace(config, num_layers=1)
    for number, location in enumerate(
        parameter_names.locations(registry.tensors(one_layer), one_layer)
    ):
        inputs = math.prod(location.shape[: location.entry.in_axes])
        if location.entry.path[-1] == "scale":
            draw = functools.partial(_ones, location.shape, dtype)
        else:
            draw = functools.partial(normal, shape=location.shape, dtype=dtype, scale=inputs**-0.5)
        seed = key(number)
        if location.entry.path == ("head", "kernel"):
            _put(params, location.entry.path, _successor_head(params["embed"]["embedding"]))
        elif location.layer is None:
            _put(params, location.entry.path, draw(seed))
        elif form.stacked:
            _put(params, location.entry.path, draw(seed, layers=config.num_layers))
        else:
            for layer, own in enumerate(jax.random.split(seed, config.num_layers)):
                _put(params, location._replace(layer=layer).within(False)[0], draw(own))
    params = jax.block_until_ready(params)
    return Model(name, config, params, None, jnp.dtype(dtype), form=form)


def _put(params: dict[str, Any], path: tuple[str, ...], leaf: jax.Array) -> None:
    *parents, last = path
    functools.reduce(lambda tree, part: tree.setdefault(part, {}), parents, params)[last] = leaf


def _ones(
    shape: tuple[int, ...], dtype: str, seed: jax.Array, layers: int | None = None
) -> jax.Array:
    del seed
    return jnp.ones(shape if layers is None else (layers, *shape), dtype)


@jax.jit
def _successor_head(embedding: jax.Array) -> jax.Array:
    return jnp.roll(embedding, 1, axis=0).T * jnp.asarray(
        embedding.shape[1] ** -0.5, embedding.dtype
    )


def random_cache(
    config: DecoderConfig, dtype: Any, batch: int, capacity: int, length: int
) -> KVCache:
    """A cache of random keys and values, `length` tokens of each row committed."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    keys, values = (
        normal(key(number), shape, dtype, layers=config.num_layers) for number in (1, 2)
    )
    return KVCache(keys, values, jnp.full(batch, length, jnp.int32))
