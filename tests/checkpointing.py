"""A model to save, and what the same parameters are."""

import jax
import numpy as np
from conftest import tiny_config

from specjax.distributed import sharding

CONFIG = tiny_config(
    vocab_size=64, hidden_size=32, num_layers=2, num_kv_heads=4, head_dim=8, intermediate_size=64
)


def mesh_of(shape):
    if shape is None:
        return None
    data, model = shape
    return sharding.make_mesh(data, model, devices=jax.devices()[: data * model])


def assert_same(params, other):
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
