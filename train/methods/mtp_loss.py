"""The loss of MTP modules, alone or added to their target's loss with weight lambda.

DeepSeek-V3 (2412.19437, section 2.2): LM + (lambda / D) * sum over modules of the cross-entropy.
FastMTP (2509.18362): one module over several steps, with decaying weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from specjax.fields import Number, Whole, optional
from specjax.methods.heads.shared_parameters import share
from specjax.models.decoder import Decoder
from specjax.models.features import EXPERTS
from specjax.models.mtp import Mtp
from train.data.batches import Batch
from train.experts.loads import Loads, below, feature_of, of_modules, of_target
from train.methods.blockwise_loss import Scores, Scoring, Teacher, score_drafts
from train.methods.losses import LossName, Parts, PositionWeights, parts_for
from train.methods.method import Measures, measure
from train.methods.packed_rows import ahead, features_of
from train.methods.target_loss import target_loss
from train.methods.unroll import unroll


@dataclass(frozen=True)
class MtpLossOptions(PositionWeights):
    """The reference of predictions, and the weights of draft steps.

    `labels` are the data's "tokens" (cross-entropy) or the "distributions" of the original target
    (KL divergence), for the modules and for a jointly trained target. Draft step i has the weight
    `decay` ** i or D-PACE's, divided by the sum of `decay` ** i, or by the number of steps.
    `label_loss` replaces the loss of the modules. If `late_loss_weight` is given, lambda has this
    value after a fraction `late_from` of the schedule.
    """

    labels: Literal["tokens", "distributions"] = "tokens"
    """The reference: tokens of the data, or distributions of the original target."""
    decay: Annotated[float, Number(above=True)] = 1.0
    """Step i has the weight decay ** i, divided by the sum over all steps, unless weights=dpace."""
    label_loss: LossName = None
    """A loss that replaces the one that labels selects: ce, kl, reverse_kl, tv, lk, lk_blend, or
    several as ce:0.1,tv:0.9. All but ce read distributions.
    """
    late_loss_weight: Annotated[float | None, optional(Number())] = None
    """The value of lambda late in the run."""
    late_from: Annotated[float, Number(0.0, 1.0)] = 0.7
    """The fraction of the schedule after which lambda is late_loss_weight."""


@dataclass(frozen=True)
class MtpLoss(MtpLossOptions):
    """The loss over `steps` draft steps; the run's learning rate schedule has `schedule_steps`.

    `loss_weight` is lambda before `late_loss_weight` applies.
    """

    steps: Annotated[int, Whole(0, 64)] = 1
    loss_weight: Annotated[float, Number()] = 0.3
    schedule_steps: Annotated[int, Whole(1)] = 1

    @property
    def parts(self) -> Parts:
        """The parts of the loss of each label and draft step and their weights, by name."""
        return parts_for(self.labels, self.label_loss)

    @property
    def step_weights(self) -> Float[Array, "K"]:
        """The weights of draft steps, which sum to one."""
        weights = self.of_drafts(self.decay, self.steps)
        return weights / weights.sum()

    def weight(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return lambda at a step of the run; the method can serve as an optax schedule."""
        parts, changes = [optax.constant_schedule(self.loss_weight)], []
        if self.late_loss_weight is not None:
            parts.append(optax.constant_schedule(self.late_loss_weight))
            changes.append(round(self.late_from * self.schedule_steps))
        return jnp.asarray(optax.join_schedules(parts, changes)(step), jnp.float32)


def modules_loss(
    head: Mtp,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    features: dict[str, Float[Array, "B T D"]],
    teacher: Teacher,
    loss: MtpLoss,
    trains_target: bool,
) -> tuple[Float[Array, ""], Scores, Loads]:
    """Return the modules' loss without lambda, its parts, and the loads of experts.

    It is the sum over labels and, with their weights, over draft steps. `features` are the features
    that the modules read, and `target_params` has the parameters that they share. Step i is scored
    if the token i positions after a label is a label too, and is in the draft vocabulary. With
    `trains_target` the gradient of the shared output layer is computed too.
    """
    params = {**params, "shared": share(target_params, draft_ids, head=True)}
    taps = {name: features[name].astype(jnp.float32) for name in head.config.features}
    steps = list(unroll(head, params, batch, taps, loss.steps))
    total, scores = score_drafts(
        Scoring(tuple(loss.parts.values()), trains_target, head.multiply, alpha=loss.dpace_alpha),
        jnp.stack([step.state for step in steps]),
        head.logit_kernel(head.module(params, 0)),
        teacher,
        teacher.counts(batch.labels, loss.steps),
        loss.step_weights,
    )
    experts = head.config.decoder.experts
    chosen = [step.experts for step in steps]
    return total, scores, of_modules(chosen, head.config.num_modules, experts, batch.labels)


def frozen_loss(
    head: Mtp,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    loss: MtpLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over labels of modules for a frozen target, and measures.

    The batch has the target's features.
    """
    columns = share(target_params, draft_ids, head=True)["draft_head"]["kernel"]
    teacher = Teacher.of(batch, columns, draft_ids)
    total, scores, loads = modules_loss(
        head, params, target_params, draft_ids, batch, batch.features, teacher, loss, False
    )
    losses = scores.by_draft("mtp", loss.parts)
    return total, measure(losses, scores.right, batch.labels).replace(loads=loads)


def joint_loss(
    head: Mtp | None,
    decoder: Decoder,
    params: dict[str, Any],
    frozen: dict[str, Any],
    batch: Batch,
    step: Int[Array, ""],
    loss: MtpLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the loss of a target plus lambda times that of its modules, and measures.

    Both are sums over labels, at `step` of the run. `params` are {"target": ..., "mtp": ...}, the
    latter only with a `head`. The `frozen` target is used only if `labels` are "distributions". A
    draft is right if it is the current target's likeliest token.
    """
    target, labels = params["target"], batch.labels
    taps = () if head is None else head.config.features
    names = tuple(dict.fromkeys(("final_norm", *taps, *feature_of(decoder))))
    features = features_of(decoder, target, batch, names)
    loads = below("target", of_target(decoder, features.get(EXPERTS), batch))
    frozen_kernel = frozen["head"]["kernel"] if loss.labels == "distributions" else None
    total, target_scores = target_loss(
        target["head"]["kernel"], features["final_norm"], frozen_kernel, batch, decoder.multiply
    )
    losses = {"lm": target_scores.losses[0, 0]}
    if head is None:
        nothing = jnp.zeros((0, *labels.shape), bool)
        return total, measure(losses, nothing, labels).replace(loads=loads)
    teacher = Teacher.of(batch, frozen_kernel, None)
    total_of_drafts, scores, loads_of_drafts = modules_loss(
        head, params["mtp"], target, None, batch, features, teacher, loss, True
    )
    choices = target_scores.choices[0]
    likeliest = jnp.stack([ahead(choices, depth) for depth in range(loss.steps)])
    losses |= scores.by_draft("mtp", loss.parts)
    measures = measure(losses, scores.choices == likeliest, labels)
    measures = measures.replace(loads=loads | below("mtp", loads_of_drafts))
    return total + loss.weight(step) * total_of_drafts, measures
