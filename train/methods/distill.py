"""Distill a draft model from a few layers of a frozen target.

The draft model starts as some of the target's layers between the target's embedding and head, which
it shares. It learns the target's distribution at every token of the target's own responses by KL
divergence, total variation, or both (DistillSpec: Zhou et al. 2310.08461).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Number, Whole
from specjax.loading.model import Model
from specjax.methods.draft_model.head import DraftModelConfig, ReducedDecoder
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_parameters import share
from specjax.models.decoder import Decoder
from train.data.batches import Batch
from train.methods.blockwise_loss import Scoring, Teacher, score_drafts
from train.methods.losses import LossName, Parts, kl_divergence, parts_of, variation
from train.methods.method import Measures, Method, measure
from train.methods.packed_rows import ahead, at_rows, features_of
from train.methods.target_layers import some_layers


@dataclass(frozen=True)
class DistillLoss:
    """Weights of KL(p || q) and of the total variation; `label_loss` replaces both.

    `depths` is the number of drafts per round to measure; it does not affect gradients. Raises
    InputError if both weights are 0.
    """

    kl: Annotated[float, Number()] = 1.0
    """The weight of KL(target || draft)."""
    tv: Annotated[float, Number()] = 0.0
    """The weight of the total variation distance."""
    depths: Annotated[int, Whole(1, 64)] = 4
    """The number of drafts per round that are measured; it does not affect gradients."""
    label_loss: LossName = None
    """A loss that replaces both: ce, kl, reverse_kl, tv, lk, lk_blend, or several as ce:0.1,tv:0.9.
    """

    def __post_init__(self) -> None:
        if not self.kl + self.tv > 0:
            raise InputError("loss.kl=0, loss.tv=0: one of them must be positive")

    @property
    def parts(self) -> Parts:
        """Return the label losses with nonzero weight and their weights, by name."""
        if self.label_loss is not None:
            return parts_of(self.label_loss)
        both = {"kl": (kl_divergence, self.kl), "tv": (variation, self.tv)}
        return {name: part for name, part in both.items() if part[1] > 0}


def distill_method(
    target: Model,
    layers: Sequence[int],
    draft_ids: np.ndarray | None,
    loss: DistillLoss,
    *,
    multiply: Any = None,
) -> Method:
    """Return a method that trains a draft model initialized from some layers of its target.

    `draft_ids` are the token ids that it drafts, None for all; `multiply` is the dtype of products.
    Raises InputError for layers that the target lacks.
    """
    count, vocab_size = target.config.num_layers, target.config.vocab_size
    if not len(layers):
        raise InputError(
            "distill.layers=(): name the target's layers that the draft model starts as"
        )
    for layer in layers:
        if not 0 <= layer < count:
            raise InputError(
                f"distill.layers={tuple(layers)}: {target.name} has no layer {layer}; use some of "
                f"0..{count - 1}"
            )
    config = DraftModelConfig(
        decoder=target.config.some_layers(layers),
        draft_vocab_size=vocab_size if draft_ids is None else len(draft_ids),
    )
    model = ReducedDecoder(Decoder(config.decoder, jnp.dtype(jnp.float32), multiply=multiply))
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        del key
        return some_layers(target, layers)

    def loss_of(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        params = {**params, "shared": share(target_params, ids, head=True)}
        return distill_loss(model, params, ids, batch, loss)

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        return Head(config.kind, config, params, draft_ids, TargetMetadata.of(target), training)

    return Method("draft_model", ("final_norm",), init, loss_of, head_of, layers=config.decoder)


def distill_loss(
    model: ReducedDecoder,
    params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    loss: DistillLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over the batch's labels, and measures of `loss.depths` drafts.

    Label j is predicted from row j - 1. A later draft is right if the model is right at each label
    up to it, since it then reads its own drafts, which equal the target's tokens.
    """
    labels = batch.labels
    features = features_of(model, params, batch, ("final_norm",))
    columns = params["shared"]["draft_head"]["kernel"]
    teacher = Teacher.of(batch, columns, draft_ids)
    total, scores = score_drafts(
        Scoring(tuple(loss.parts.values()), False, model.decoder.multiply),
        at_rows(features["final_norm"], labels - 1)[None],
        columns,
        teacher,
        teacher.counts(labels, 1),
        jnp.ones(1),
    )
    depths = range(loss.depths)
    right = jnp.stack([ahead(scores.right[0], depth) for depth in depths])
    return total, measure(scores.named(loss.parts), right, labels)
