"""The loss of a target that is trained jointly with its drafter."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from train.data.batches import Batch
from train.methods.blockwise_loss import Scores, Scoring, Teacher, score_drafts
from train.methods.losses import parts_for
from train.methods.packed_rows import at_rows


def target_loss(
    kernel: Float[Array, "D V"],
    final_norm: Float[Array, "B T D"],
    before: Float[Array, "D V"] | None,
    batch: Batch,
    multiply: Any = None,
) -> tuple[Float[Array, ""], Scores]:
    """Return the sum of the target's loss over the batch's labels, and its parts.

    `kernel` and `final_norm` are the output layer and the feature of the current target. With
    `before`, the output layer of the original target, whose features are in the batch, the loss is
    the KL divergence from that target; otherwise it is the cross-entropy with the data's tokens.
    """
    labels = batch.labels
    teacher = Teacher.of(batch, before, None)
    parts = parts_for("tokens" if before is None else "distributions")
    return score_drafts(
        Scoring(tuple(parts.values()), True, multiply),
        at_rows(final_norm, labels - 1)[None],
        kernel,
        teacher,
        teacher.counts(labels, 1),
        jnp.ones(1),
    )
