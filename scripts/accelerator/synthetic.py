"""Random weights and caches made on the device, since the host would take minutes for them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.core.cache import KVCache
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig
from specjax.models.form import Form
from specjax.models.parameter_table import parameter_table
from specjax.models.parameters import Parameter


def key(number: int) -> jax.Array:
    """Return a key of the backend's own generator, which is faster than the default one."""
    return jax.random.key(number, impl="rbg")


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "scale", "layers"))
def normal(
    seed: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    scale: float = 1.0,
    layers: int | None = None,
) -> jax.Array:
    """Return normal numbers times `scale`; with `layers`, a stack of that many arrays.

    The arrays of a stack are drawn one by one, to save memory.
    """

    def one(seed: jax.Array) -> jax.Array:
        return jax.random.normal(seed, shape, dtype) * jnp.asarray(scale, dtype)

    # Drawn one by one, so that the generator's own numbers never exist for the whole stack.
    return one(seed) if layers is None else lax.map(one, jax.random.split(seed, layers))


def random_model(name: str, config: DecoderConfig, dtype: str, form: Form) -> Model:
    """Return an untied random model whose greedy continuation no rounding can change.

    Kernels are scaled by 1/sqrt(inputs). The head's column for token t + 1 is the embedding of t,
    so that t + 1 follows t by a wide margin. In bfloat16 a pass over several tokens rounds
    differently from a pass over one token; with a random head the argmax would soon differ, and a
    recorded continuation would no longer match the one that is verified.
    """
    embedding = normal(key(0), (config.vocab_size, config.hidden_size), dtype)
    table = parameter_table(replace(config, num_layers=1), scan_layers=False)
    layer, count = table["layers"]["0"], config.num_layers
    seeds = jax.tree.unflatten(
        jax.tree.structure(layer), map(key, range(1, 1 + len(jax.tree.leaves(layer))))
    )
    params = {
        "embed": {"embedding": embedding},
        "head": {"kernel": _successor_head(embedding)},
        "final_norm": jax.tree.map(lambda entry: jnp.ones(entry.shape, dtype), table["final_norm"]),
    }
    if form.stacked:
        draw = functools.partial(_draw, dtype=dtype, layers=count)
        params["layers"] = jax.tree.map(draw, layer, seeds)
    else:
        own = jax.tree.map(lambda seed: jax.random.split(seed, count), seeds)
        params["layers"] = {
            str(index): jax.tree.map(
                lambda entry, seed, index=index: _draw(entry, seed[index], dtype), layer, own
            )
            for index in range(count)
        }
    params = jax.block_until_ready(params)
    return Model(name, config, params, None, jnp.dtype(dtype), form=form)


def _draw(entry: Parameter, seed: jax.Array, dtype: str, layers: int | None = None) -> jax.Array:
    """Return a random kernel, or the scale of a norm, of one layer or of several stacked layers."""
    if entry.kind == "ones":
        return jnp.ones(entry.shape if layers is None else (layers, *entry.shape), dtype)
    return normal(seed, entry.shape, dtype, entry.shape[-2] ** -0.5, layers)


@jax.jit
def _successor_head(embedding: jax.Array) -> jax.Array:
    return jnp.roll(embedding, 1, axis=0).T * jnp.asarray(
        embedding.shape[1] ** -0.5, embedding.dtype
    )


def random_cache(
    config: DecoderConfig, dtype: Any, batch: int, capacity: int, length: int
) -> KVCache:
    """Return a cache of random keys and values, with `length` committed tokens in each row."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    keys, values = (
        normal(key(number), shape, dtype, layers=config.num_layers) for number in (1, 2)
    )
    return KVCache(keys, values, jnp.full(batch, length, jnp.int32))
