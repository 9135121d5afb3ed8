"""Batches of the rows that an engine has recorded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.distributed.sharding import constrain_rows
from specjax.engine.recording import RecordedRows
from train.data.batches import CONTEXT, Batch


@functools.partial(jax.jit, static_argnames="num_labels")
def batch_of(recorded: RecordedRows, rows: Int[Array, "B"], *, num_labels: int) -> Batch:
    """Return a batch whose rows are some recorded rows, one text each.

    The labels are the first `num_labels` (A) tokens of each text's output.
    """
    length, index = recorded.length[rows], jnp.arange(recorded.tokens.shape[1])[None, :]
    inside = index < length[:, None]
    output = jnp.maximum(recorded.output[rows], CONTEXT)
    labels = output[:, None] + jnp.arange(num_labels)[None, :]
    batch = Batch(
        tokens=recorded.tokens[rows],
        positions=jnp.where(inside, recorded.first[rows][:, None] + index, 0),
        segments=inside.astype(jnp.int32),
        labels=jnp.where(labels < length[:, None], labels, -1),
        features={name: kept[rows] for name, kept in recorded.features.items()},
    )
    return constrain_rows(batch)
