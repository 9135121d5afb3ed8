"""Losses of drafts per label, and the functions of which they are composed.

They return one value per label or row, not a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def soft_cross_entropy(
    logits: Float[Array, "... Vd"], distribution: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """Return -sum p log q, given the logits of q; its gradient equals that of KL(p || q)."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(distribution * logits, axis=-1)


def total_variation(
    logits: Float[Array, "... Vd"], distribution: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """Return half of sum |p - q|, one minus the acceptance of rejection (Leviathan 2211.17192).

    `logits` are those of q. With a draft vocabulary, p must be the distribution conditioned on it.
    """
    return 0.5 * jnp.sum(jnp.abs(distribution - jax.nn.softmax(logits, axis=-1)), axis=-1)


def smooth_l1(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return the mean over D of the Huber loss of x - y, with its corner at 1."""
    apart = jnp.abs(x - y)
    return jnp.mean(jnp.where(apart < 1, 0.5 * apart * apart, apart - 0.5), axis=-1)


class Truth(NamedTuple):
    """The reference for a draft: the target's log-probabilities, and the index of the data's token.

    The log-probabilities are None if only the data is the reference.
    """

    log_probs: Float[Array, "B A Vd"] | None
    token: Int[Array, "B A"]


LabelLoss = Callable[[Float[Array, "B A Vd"], Truth], Float[Array, "B A"]]
"""A function that returns the loss of each label, given a draft's logits and the reference."""


def kl_divergence(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return KL(p || q) per label, where p is the target's distribution and q the draft's."""
    distribution = jnp.exp(truth.log_probs)
    return soft_cross_entropy(logits, distribution) + jnp.sum(
        distribution * truth.log_probs, axis=-1
    )


def variation(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return per label the total variation distance of p and q over the draft vocabulary."""
    return total_variation(logits, jnp.exp(truth.log_probs))


def cross_entropy(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return -log q(token) per label, where the token is the data's and q the draft's."""
    own = jnp.take_along_axis(logits, truth.token[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def label_loss_of(labels: str, replacement: LabelLoss | None = None) -> LabelLoss:
    """Return the label loss of a reference: "tokens" of the data, or the target's "distributions".

    They are `cross_entropy` and `kl_divergence`. If `replacement` is given, it is returned instead.
    """
    if replacement is not None:
        return replacement
    return kl_divergence if labels == "distributions" else cross_entropy
