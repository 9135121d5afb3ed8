"""Losses of a draft: of each label, by what it is scored by, and those that they are made of.

One value per label or row, not summed.
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
    """-sum p log q from the logits of q and a distribution p: the gradient of KL(p || q)."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(distribution * logits, axis=-1)


def total_variation(
    logits: Float[Array, "... Vd"], distribution: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """Half of sum |p - q|: one minus the chance that rejection accepts (Leviathan 2211.17192).

    Over a part of the vocabulary, of the tokens in it: p is their distribution, given one of them.
    """
    return 0.5 * jnp.sum(jnp.abs(distribution - jax.nn.softmax(logits, axis=-1)), axis=-1)


def smooth_l1(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Mean over D of the Huber loss with its corner at 1."""
    apart = jnp.abs(x - y)
    return jnp.mean(jnp.where(apart < 1, 0.5 * apart * apart, apart - 0.5), axis=-1)


class Truth(NamedTuple):
    """What a draft is scored by: the target's log-probabilities, and the data's token's index.

    There are no log-probabilities where the teacher is the data alone.
    """

    log_probs: Float[Array, "B A Vd"] | None
    token: Int[Array, "B A"]


LabelLoss = Callable[[Float[Array, "B A Vd"], Truth], Float[Array, "B A"]]
"""The loss of each label, from a draft's logits and what it is scored by."""


def kl_divergence(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """KL(p || q)."""
    distribution = jnp.exp(truth.log_probs)
    return soft_cross_entropy(logits, distribution) + jnp.sum(
        distribution * truth.log_probs, axis=-1
    )


def variation(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """The total variation of p and q, both over the draft vocabulary."""
    return total_variation(logits, jnp.exp(truth.log_probs))


def cross_entropy(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """-log q of the data's token."""
    own = jnp.take_along_axis(logits, truth.token[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def label_loss_of(labels: str, replacement: LabelLoss | None = None) -> LabelLoss:
    """The loss of labels that are the data's "tokens" or the target's "distributions".

    A `replacement`, where there is one, stands for both.
    """
    if replacement is not None:
        return replacement
    return kl_divergence if labels == "distributions" else cross_entropy
