"""Medusa-1: heads for a frozen target, with the loss that Medusa-2 also uses.

Cai et al. 2401.10774. Head i predicts the token i + 1 positions after the one that the target
itself predicts from the same feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jaxtyping import Array, Float, Int, Key

from specjax.fields import Number
from specjax.loading.model import Model
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_parameters import share
from specjax.methods.medusa.head import Medusa, MedusaConfig
from train.data.batches import Batch
from train.methods.blockwise_loss import Scores, Scoring, Teacher, score_drafts
from train.methods.losses import LossName, Parts, PositionWeights, parts_for
from train.methods.method import Measures, Method, measure
from train.methods.packed_rows import at_rows


@dataclass(frozen=True)
class MedusaLoss(PositionWeights):
    """The loss of Medusa heads.

    `labels` "tokens" means cross-entropy with the data's tokens, and "distributions" KL divergence
    from the target; `label_loss` replaces either. Head i (0-based) has the weight `decay` ** i, or
    D-PACE's.
    """

    labels: Literal["tokens", "distributions"] = "distributions"
    """The reference: tokens of the data, or distributions of the target."""
    decay: Annotated[float, Number(above=True)] = 0.8
    """Head i has the weight decay ** i, unless weights=dpace."""
    label_loss: LossName = None
    """A loss that replaces the one that labels selects: ce, kl, reverse_kl, tv, lk, lk_blend, or
    several as ce:0.1,tv:0.9.
    """

    @property
    def parts(self) -> Parts:
        """The parts of the loss of each label and head and their weights, by name."""
        return parts_for(self.labels, self.label_loss)


def medusa_method(
    target: Model,
    config: MedusaConfig,
    draft_ids: np.ndarray | None,
    loss: MedusaLoss,
    *,
    multiply: Any = None,
) -> Method:
    """Return a method that trains Medusa heads, initialized as copies of a frozen target's head.

    `draft_ids` are the token ids that the heads draft, None for all; `multiply` is the dtype of
    products.
    """
    head = Medusa(config, jnp.dtype(jnp.float32), multiply)
    ids = None if draft_ids is None else jnp.asarray(draft_ids)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        return first_params(head, target, draft_ids, key)

    def loss_of(
        params: Any, target_params: Any, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], Measures]:
        del key
        columns = share(target_params, ids, head=True)["draft_head"]["kernel"]
        teacher = Teacher.of(batch, columns, ids)
        total, scores = heads_loss(
            head, params, columns, batch.features["final_norm"], batch.labels, teacher, loss
        )
        return total, heads_measures(loss, scores, batch.labels, {})

    def head_of(params: Any, training: dict[str, Any]) -> Head:
        return Head(config.kind, config, params, draft_ids, TargetMetadata.of(target), training)

    return Method("medusa", ("final_norm",), init, loss_of, head_of)


def first_params(
    head: Medusa, target: Model, draft_ids: np.ndarray | None, key: Key[Array, ""]
) -> dict[str, Any]:
    """Return initial parameters of Medusa heads, whose output layers are copies of the target's.

    The copies have the columns of the tokens `draft_ids`, or all for None. `key` draws the others.
    """
    params = meta.unbox(head.init(key))
    if not head.config.original_lm_head:
        kernel = np.asarray(target.params["head"]["kernel"], np.float32)
        kernel = kernel if draft_ids is None else kernel[:, draft_ids]
        params["head"] = {"kernel": jnp.asarray(np.stack([kernel] * head.config.num_heads))}
    return params


def heads_loss(
    head: Medusa,
    params: dict[str, Any],
    columns: Float[Array, "D Vd"],
    final_norm: Float[Array, "B T D"],
    labels: Int[Array, "B A"],
    teacher: Teacher,
    loss: MedusaLoss,
    trains_columns: bool = False,
) -> tuple[Float[Array, ""], Scores]:
    """Return the loss, summed over heads with their weights and over labels, and its parts.

    For label j all heads read row j - 2 of `final_norm`; head i is scored at label j + i, if there
    is one, against `teacher`. `columns` are columns of the target's output layer, for heads without
    their own; with `trains_columns` their gradient is computed too.
    """
    has_output = not head.config.original_lm_head
    kernel = params["head"]["kernel"] if has_output else columns
    states = head.states(params, at_rows(final_norm, labels - 2))
    plan = Scoring(
        tuple(loss.parts.values()),
        has_output or trains_columns,
        head.multiply,
        alpha=loss.dpace_alpha,
    )
    return score_drafts(
        plan,
        states,
        kernel,
        teacher,
        teacher.counts(labels, head.config.num_heads),
        loss.of_drafts(loss.decay, head.config.num_heads),
    )


def heads_measures(
    loss: MedusaLoss,
    scores: Scores,
    labels: Int[Array, "B A"],
    others: dict[str, Float[Array, ""]],
) -> Measures:
    """Return the measures of all heads; `others` are more parts of the loss by name, as sums."""
    return measure({**others, **scores.by_draft("head", loss.parts)}, scores.right, labels)
