"""Values at the labels of packed rows, and a target's features at them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.methods.draft_model.head import ReducedDecoder
from specjax.models.decoder import Decoder
from train.data.batches import Batch


def visible(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Return a mask of what each token attends to: the tokens of its segment up to itself."""
    same = segments[:, :, None] == segments[:, None, :]
    rows = segments.shape[1]
    return same & jnp.tril(jnp.ones((1, rows, rows), bool))


def features_of(
    model: Decoder | ReducedDecoder,
    params: Any,
    batch: Batch,
    names: tuple[str, ...],
    **options: Any,
) -> dict[str, Float[Array, "... T D"]]:
    """Return the named features of a batch's tokens, differentiable with respect to `params`.

    Most are [B, T, D], and `layer_inputs` is [L, B, T, D]. `options` are further arguments of
    `extend`.
    """
    return model.extend(
        params,
        batch.tokens,
        batch.positions,
        None,
        None,
        0,
        visible(batch.segments),
        features=names,
        logits=False,
        **options,
    ).features


def fill_features(
    target: Decoder, target_params: Any, batch: Batch, names: tuple[str, ...]
) -> Batch:
    """Return the batch with all of the named features, of which those it lacks are computed.

    No gradient flows through the computed ones.
    """
    missing = tuple(name for name in names if name not in batch.features)
    if not missing:
        return batch
    found = features_of(target, target_params, batch, missing)
    return batch.replace(features={**batch.features, **jax.lax.stop_gradient(found)})


def at_rows(
    values: Shaped[Array, "B T *rest"], rows: Int[Array, "B A"]
) -> Shaped[Array, "B A *rest"]:
    """Return `values` at the positions `rows` of each sequence.

    Negative positions, which pad labels, give the value at position 0.
    """
    rows = jnp.maximum(rows, 0)
    return jax.vmap(lambda value, positions: value[positions])(values, rows)


def ahead(values: Shaped[Array, "B A *rest"], depth: int) -> Shaped[Array, "B A *rest"]:
    """Return the values `depth` places later in each row's list of labels, then zeros."""
    room = ((0, 0), (0, depth)) + ((0, 0),) * (values.ndim - 2)
    return jnp.pad(values, room)[:, depth:]


def label_ahead(labels: Int[Array, "B A"], depth: int) -> Bool[Array, "B A"]:
    """Return a mask of the labels for which the token `depth` positions later is a label too."""
    return (labels >= 0) & (ahead(labels, depth) == labels + depth)
