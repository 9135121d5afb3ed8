"""Draft steps of a head over packed rows, computed as in decoding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models.layers.attention import Partial, attend_in_blocks, merge
from specjax.models.pair_head import PairHead
from train.data.batches import Batch
from train.methods.packed_rows import at_rows, visible


class DraftStep(NamedTuple):
    """A draft step at each label: the layer's output, and the state from which logits are computed.

    `experts` are the experts that computed the output, if the layer has any.
    """

    output: Float[Array, "B A D"]
    state: Float[Array, "B A D"]
    experts: Int[Array, "B A K"] | None


def unroll(
    head: PairHead,
    params: dict[str, Any],
    batch: Batch,
    taps: dict[str, Float[Array, "B T Dt"]],
    steps: int,
) -> Iterator[DraftStep]:
    """Yield the draft steps of a head, at least one per module (D), at each label.

    `taps` are the target's features that the head reads, by name, and `steps` the number of steps.
    Label j is predicted from row r = j - 2, and step i predicts x_{j+i}. Step k < D runs module k
    on x_{j-1+k} and the output of module k - 1 at the same row (the target's features for k = 0),
    and attends to its own pairs at rows up to r of the same segment. A further step runs the last
    module on x_{j-1+i} and its own output, at the next position. It attends to the pairs that this
    module read and, at its own row, to those of earlier steps, so that scores of shape [B, H, T, T
    + i] never exist (EAGLE-3's training-time test, 2503.01840). Keys and values are computed for
    all rows; the rest, if no module follows, only for the rows of labels.
    """
    labels, tokens, last = batch.labels, batch.tokens, head.config.num_modules - 1
    # Row 0 for missing labels, since empty attention and its gradient would be NaN.
    rows = jnp.maximum(labels - 2, 0)
    positions, segments = at_rows(batch.positions, rows), at_rows(batch.segments, rows)
    same = segments[:, :, None] == batch.segments[:, None, :]
    until = jnp.arange(tokens.shape[1])[None, None, :] <= rows[:, :, None]
    repeats = head.config.decoder.num_heads // head.config.decoder.num_kv_heads

    def repeated(seen: jax.Array) -> jax.Array:
        return jnp.repeat(seen, repeats, axis=1)[:, None]

    attend = functools.partial(attend_in_blocks, rounded=head.multiply is not None)
    hidden = head.fuse(params, taps)
    for index in range(last + 1):
        own = head.module(params, index)
        residual, attended = head.inputs(
            own, jnp.roll(tokens, -1 - index, axis=1), hidden, batch.positions
        )
        query, keys, values, gate = head.heads(own, attended, batch.positions)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        if index < last:
            mixed = attend(query, keys, values, repeated(visible(batch.segments)))
            whole, experts = head.finish(own, residual, mixed, gate)
            hidden, output = head.next_hidden(own, whole), at_rows(whole, rows)
            experts = None if experts is None else at_rows(experts, rows)
            yield DraftStep(output, head.readout(own, output), experts)

    seen = repeated(same & until)
    earlier: list[tuple[jax.Array, jax.Array]] = []
    # Queries are made again for fewer rows; XLA drops those that are not read.
    residual, attended = at_rows(residual, rows), at_rows(attended, rows)
    for further in range(steps - last):
        if further:
            ahead = jnp.minimum(labels - 1 + last + further, tokens.shape[1] - 1)
            residual, attended = head.inputs(
                own, at_rows(tokens, ahead), head.next_hidden(own, output), positions + further
            )
        query, key, value, gate = head.heads(own, attended, positions + further)
        mixed = attend(query, keys, values, seen)
        if further:
            earlier.append((_own(key, repeats), _own(value, repeats)))
        for key_own, value_own in earlier:
            mixed = merge(mixed, _attend_own(query, key_own, value_own))
        output, experts = head.finish(own, residual, mixed, gate)
        yield DraftStep(output, head.readout(own, output), experts)


def _own(heads: Float[Array, "B A G C"], repeats: int) -> Float[Array, "B G X C"]:
    return jnp.repeat(heads.transpose(0, 2, 1, 3), repeats, axis=2)


def _attend_own(
    query: Float[Array, "B G X C"], key: Float[Array, "B G X C"], value: Float[Array, "B G X C"]
) -> Partial:
    """Return the attention of each query to the single key of its own row."""
    score = jnp.sum(query * key, axis=-1, keepdims=True)
    return Partial(score, jnp.ones_like(score), value)
