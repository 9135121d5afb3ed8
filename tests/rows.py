"""A small batch of packed rows, for the tests of losses."""

import jax
import jax.numpy as jnp
import numpy as np

from train.data.batches import Batch
from train.methods.packed_rows import fill_features


def two_rows(vocab_size, seed=0):
    """Two rows: two conversations and padding, and one that fills its row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (2, 24)).astype(np.int32)
    segments = np.array([[1] * 10 + [2] * 11 + [0] * 3, [1] * 24], np.int32)
    positions = np.array([[*range(10), *range(11), 0, 0, 0], [*range(24)]], np.int32)
    labels = np.full((2, 20), -1, np.int32)
    labels[0, :12] = [*range(4, 10), *range(14, 20)]
    labels[1, :18] = [*range(2, 12), *range(16, 24)]
    return Batch(*map(jnp.asarray, (tokens, positions, segments, labels)), {})


def with_features(target, batch, names=("final_norm",)):
    """The batch with features of the target."""

    def fill(params, batch):
        return fill_features(target.architecture, params, batch, names)

    return jax.jit(fill)(target.params, batch)
