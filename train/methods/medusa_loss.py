"""What Medusa heads learn, whether the target is frozen or trained too.

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

from specjax.fields import Number, check_instance
from specjax.loading.model import Model
from specjax.models.heads.medusa import Medusa
from train.methods.draft_losses import (
    Scores,
    Scoring,
    Teacher,
    cross_entropy,
    kl_divergence,
    score_drafts,
)
from train.methods.labels import at_rows, label_ahead
from train.methods.method import Measures, measure


@dataclass(frozen=True)
class MedusaLoss:
    """The loss: `labels` are the data's "tokens", or the target's "distributions" at them.

    Head i (0-based) counts `decay` ** i. Raises InputError for values that make no sense.
    """

    labels: Literal["tokens", "distributions"] = "distributions"
    decay: Annotated[float, Number(above=True)] = 0.8

    def __post_init__(self) -> None:
        check_instance(self, "loss.")


def first_params(
    head: Medusa, target: Model, draft_ids: np.ndarray | None, key: Key[Array, ""]
) -> dict[str, Any]:
    """Initial parameters: blocks that are zero, and heads that are copies of the target's."""
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
    """The weighted sum over heads and labels, and what it is made of.

    For label j all heads read row j - 2; head i is scored at label j + i, where there is one.
    `columns` are those of the target's head, which heads without one of their own use.
    """
    own = not head.config.original_lm_head
    kernel = params["head"]["kernel"] if own else columns
    part = kl_divergence if loss.labels == "distributions" else cross_entropy
    states = head.states(params, at_rows(final_norm, labels - 2))
    return score_drafts(
        Scoring(((part, 1.0),), own or trains_columns, head.multiply),
        states,
        kernel,
        teacher,
        teacher.counts(labels, head.config.num_heads),
        loss.decay ** jnp.arange(head.config.num_heads, dtype=jnp.float32),
    )


def heads_measures(
    scores: Scores, labels: Int[Array, "B A"], others: dict[str, Float[Array, ""]]
) -> Measures:
    """Measures of all heads; `others` are parts of the loss beside theirs."""
    heads = scores.right.shape[0]
    scored = jnp.stack([label_ahead(labels, head) for head in range(heads)])
    each = {f"head_{head}": scores.losses[head, 0] for head in range(heads)}
    return measure({**others, **each}, scores.right, scored)
