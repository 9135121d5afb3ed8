"""Medusa-2: joint training of the target and its heads in two stages (Cai et al. 2401.10774).

At first only the heads learn, so that their large gradients do not harm the target; then both
learn. The target learns to match its original self (self-distillation), or the data's tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.fields import Number, Whole
from specjax.loading.model import Model
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.medusa.head import Medusa, MedusaConfig
from specjax.models.decoder import Decoder
from specjax.models.features import EXPERTS
from train.data.batches import Batch
from train.experts.loads import below, feature_of, of_target
from train.methods.blockwise_loss import Teacher
from train.methods.medusa import MedusaLoss, first_params, heads_loss, heads_measures
from train.methods.method import Measures, Method
from train.methods.packed_rows import features_of
from train.methods.target_layers import in_float32, with_params
from train.methods.target_loss import target_loss


@dataclass(frozen=True)
class JointOptions:
    """Options of joint training: the target's own loss plus `heads` times that of the heads.

    `target` is "self" (KL divergence from the original target) or "tokens" (cross-entropy with the
    data). For `warm_steps` only the heads learn; with `ramp` their weight then rises as a quarter
    of a sine.
    """

    target: Literal["self", "tokens"] = "self"
    """The target's own loss: KL divergence from the original target, or cross-entropy with the
    data.
    """
    heads: Annotated[float, Number(above=True)] = 0.01
    """The weight of the heads' loss beside the target's; as published 0.2, with target=tokens."""
    ramp: bool = True
    """Whether the weight of the heads rises as a quarter of a sine."""
    warm_steps: Annotated[int, Whole()] = 0
    """The number of first steps in which only the heads learn."""


@dataclass(frozen=True)
class JointLoss(JointOptions):
    """The options of joint training, in a run in which the ramp ends at step `steps`."""

    steps: Annotated[int, Whole(1)] = 1

    def weight(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the weight of the heads' loss at a step of the joint stage."""
        if not self.ramp:
            return jnp.float32(self.heads)
        span = max(self.steps - self.warm_steps, 1)
        # As a float: after the last int32 there is none.
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - self.warm_steps + 1) / span, 0.0, 1.0)
        return self.heads * jnp.sin(0.5 * jnp.pi * done)


def medusa2_method(
    target: Model,
    config: MedusaConfig,
    draft_ids: np.ndarray | None,
    loss: MedusaLoss,
    joint: JointLoss,
    *,
    multiply: Any = None,
) -> Method:
    """Return a method that trains Medusa heads and their target jointly.

    Parameters are {"target": ..., "heads": ...}; `draft_ids` are the token ids that the heads
    draft, None for all, and `multiply` is the dtype of products.
    """
    dtype = jnp.dtype(jnp.float32)
    head = Medusa(config, dtype, multiply)
    decoder = dataclasses.replace(target.architecture, dtype=dtype, multiply=multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        return {"target": in_float32(target), "heads": first_params(head, target, draft_ids, key)}

    def loss_of(
        params: Any,
        target_params: Any,
        batch: Batch,
        key: Key[Array, ""] | None,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        return joint_loss(head, decoder, params, target_params, ids, batch, step, loss, joint)

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        metadata = TargetMetadata.of(target)
        return Head(config.kind, config, params["heads"], draft_ids, metadata, training)

    def model_of(params: Any) -> Model:
        return with_params(target, params["target"])

    return Method(
        "medusa2",
        ("final_norm",),
        init,
        loss_of,
        head_of,
        model_of,
        exports="both",
        trains_target=True,
        drafter="heads",
        takes_step=True,
        layers=target.config,
    )


def joint_loss(
    head: Medusa,
    decoder: Decoder,
    params: dict[str, Any],
    frozen: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    step: Int[Array, ""],
    loss: MedusaLoss,
    joint: JointLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over the batch's labels at a step, and measures of the heads.

    `decoder` computes the target's features from `params`, and `joint` weighs its loss and the
    heads'. Distributions, and whether tokens are right, are according to the `frozen` target, whose
    features are in the batch.
    """

    def columns(kernel: Float[Array, "D V"]) -> Float[Array, "D Vd"]:
        return kernel if draft_ids is None else jnp.take(kernel, draft_ids, axis=1)

    labels = batch.labels
    teacher = Teacher.of(batch, columns(frozen["head"]["kernel"]), draft_ids)

    def heads_alone(params: dict[str, Any]) -> tuple[Array, Measures]:
        features = batch.features["final_norm"]
        total, scores = heads_loss(
            head, params["heads"], teacher.columns, features, labels, teacher, loss
        )
        measures = heads_measures(loss, scores, labels, {"target": jnp.float32(0)})
        return total, measures.replace(loads=below("target", of_target(decoder, None, batch)))

    def together(params: dict[str, Any]) -> tuple[Array, Measures]:
        target = params["target"]
        names = ("final_norm", *feature_of(decoder))
        features = features_of(decoder, target, batch, names)
        final_norm, kernel = features["final_norm"], target["head"]["kernel"]
        frozen_kernel = frozen["head"]["kernel"] if joint.target == "self" else None
        total, target_scores = target_loss(kernel, final_norm, frozen_kernel, batch, head.multiply)
        total_of_heads, scores = heads_loss(
            head,
            params["heads"],
            columns(kernel),
            final_norm,
            labels,
            teacher,
            loss,
            trains_columns=True,
        )
        own = {"target": target_scores.losses[0, 0]}
        measures = heads_measures(loss, scores, labels, own)
        loads = below("target", of_target(decoder, features.get(EXPERTS), batch))
        return total + joint.weight(step) * total_of_heads, measures.replace(loads=loads)

    if not joint.warm_steps:
        return together(params)
    return lax.cond(step < joint.warm_steps, heads_alone, together, params)
