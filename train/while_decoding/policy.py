"""The loss of a policy gradient on roll-outs, for a target that changes while it decodes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.decoder import Decoder
from train.data.batches import Batch
from train.methods.packed_rows import at_rows, features_of
from train.run.setup import check_logits


def policy_loss(
    decoder: Decoder, params: Any, batch: Batch, advantages: Float[Array, "B"]
) -> Float[Array, ""]:
    """Return minus the mean over labels of a row's advantage times the label's log-probability.

    The rows are samples of the target at temperature 1, of whose rewards `advantages` are the
    differences to those of others (REINFORCE with a baseline, Williams 1992). Rows without the
    beginning of their text, on which it depends, do not count. Raises InputError for a target whose
    logits are not just a product with its output layer.
    """
    check_logits(decoder.config, "the target")
    rows = batch.labels - 1
    hidden = at_rows(features_of(decoder, params, batch, ("final_norm",))["final_norm"], rows)
    logp = jax.nn.log_softmax(hidden @ params["head"]["kernel"])
    tokens = at_rows(batch.tokens, batch.labels)
    chosen = jnp.take_along_axis(logp, tokens[:, :, None], axis=2)[:, :, 0]
    known = (batch.labels >= 0) & (batch.positions[:, :1] == 0)
    return -jnp.where(known, advantages[:, None] * chosen, 0).sum() / jnp.maximum(known.sum(), 1)
