"""The loss of EAGLE heads, over several draft steps that read the head's own outputs.

EAGLE-1 (Li et al. 2401.15077): the next feature by smooth L1 and its token by cross-entropy, from
true features with noise. EAGLE-3 (2503.01840): cross-entropy alone ("training-time test").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Number, Whole, check_instance
from specjax.models.heads.eagle import Eagle
from train.data.batches import Batch
from train.methods.blockwise_loss import Scoring, Teacher, score_drafts
from train.methods.losses import LabelLoss, Truth, smooth_l1, soft_cross_entropy
from train.methods.method import Measures, measure
from train.methods.packed_rows import ahead, at_rows, label_ahead
from train.methods.unroll import unroll


@dataclass(frozen=True)
class EagleLoss:
    """Weights of the parts of the loss, and over how many draft steps it runs.

    Step i has the weight `decay` ** i. `noise` is the half-width of the uniform noise on features.
    `label_loss` replaces the cross-entropy, whose weight it has. Raises InputError for values out
    of range.
    """

    steps: Annotated[int, Whole(1, 64)] = 4
    decay: Annotated[float, Number()] = 0.8
    cross_entropy: Annotated[float, Number()] = 1.0
    feature: Annotated[float, Number()] = 0.0
    noise: Annotated[float, Number()] = 0.0
    label_loss: LabelLoss | None = None

    def __post_init__(self) -> None:
        check_instance(self, "loss.")
        if not self.cross_entropy + self.feature > 0:
            raise InputError("loss.cross_entropy=0, loss.feature=0: one of them must be positive")

    @property
    def part(self) -> tuple[str, LabelLoss]:
        """The loss of each label, and its name among the measures."""
        if self.label_loss is not None:
            return "label_loss", self.label_loss
        return "cross_entropy", _against_distribution


def eagle_loss(
    head: Eagle,
    params: dict[str, Any],
    target_params: dict[str, Any],
    draft_ids: Int[Array, "Vd"] | None,
    batch: Batch,
    key: Key[Array, ""] | None,
    loss: EagleLoss,
) -> tuple[Float[Array, ""], Measures]:
    """The sum of the loss over the batch's labels, and measures of each draft step.

    Step i is scored where the token i positions after a label is a label too; its loss counts where
    that token is in the draft's vocabulary, over which the target's distribution is renormalised.
    Without a key there is no noise.
    """
    labels = batch.labels
    features = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
    taps = {name: features[name] for name in head.config.taps}
    if loss.noise and key is not None:
        keys = jax.random.split(key, len(taps))
        taps = {
            name: value
            + jax.random.uniform(one, value.shape, minval=-loss.noise, maxval=loss.noise)
            for one, (name, value) in zip(keys, taps.items(), strict=True)
        }
    columns = target_params["head"]["kernel"]
    columns = columns if draft_ids is None else jnp.take(columns, draft_ids, axis=1)
    teacher = Teacher.of(batch, columns, draft_ids)
    steps = list(unroll(head, params, batch, taps, loss.steps))
    outputs = jnp.stack([step.output for step in steps])
    states = jnp.stack([step.state for step in steps])
    weights = jnp.asarray([loss.decay**step for step in range(loss.steps)])
    name, part = loss.part
    plan = Scoring(
        parts=((part, loss.cross_entropy),),
        trains_kernel=head.config.version == 3,
        multiply=head.multiply,
    )
    total, scores = score_drafts(
        plan,
        states,
        head.logit_kernel(params),
        teacher,
        teacher.counts(labels, loss.steps),
        weights,
    )
    scored = jnp.stack([label_ahead(labels, step) for step in range(loss.steps)])
    parts = {name: scores.losses[:, 0].sum()}
    if loss.feature:
        truth = at_rows(features["final_norm"], labels - 1)
        truth = lax.stop_gradient(jnp.stack([ahead(truth, step) for step in range(loss.steps)]))
        distances = jnp.where(scored, smooth_l1(outputs, truth), 0.0).sum(axis=(1, 2))
        parts["feature"] = distances.sum()
        total += loss.feature * jnp.dot(weights, distances)
    return total, measure(parts, scores.right, scored)


def _against_distribution(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    return soft_cross_entropy(logits, jnp.exp(truth.log_probs))
