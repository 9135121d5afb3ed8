"""Losses between a draft's distribution and the target's, one value per row, not summed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
