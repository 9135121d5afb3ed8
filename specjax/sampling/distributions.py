"""Two distributions of one token, the target's p and the draft's q: overlap, ratio, residual."""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float


def acceptance_probability(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """min(1, p/q) of each token: how often a draft of it is accepted (Leviathan et al. 2211.17192).

    A token that the target never emits (p = 0) has 0, whatever q is; else one that the draft never
    proposes (q = 0) has 1.
    """
    return jnp.exp(jnp.minimum(log_ratio(logp, logq), 0))


def overlap(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """The sum of min(p, q) = 1 - TV(p, q): the chance that a token drawn from q is accepted."""
    return jnp.sum(jnp.exp(jnp.minimum(logp, logq)), axis=-1)


def residual(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """The log-probabilities norm(max(0, p - q)) of the token that follows a rejected draft.

    Where nothing is left (p = q) it is p.
    """
    left = excess(logp, logq)
    mass = logsumexp(left, axis=-1, keepdims=True)
    return jnp.where(mass > -jnp.inf, left - jnp.where(mass > -jnp.inf, mass, 0), logp)


def log_ratio(logp: Float[Array, "*rows"], logq: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """log(p / q): -inf where p = 0, else +inf where q = 0."""
    possible = logp > -jnp.inf
    return jnp.where(possible, jnp.where(possible, logp, 0) - logq, -jnp.inf)


def excess(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """The logarithm of max(0, p - q), of distributions that need not be normalised."""
    above = logp > logq
    gap = jnp.where(above, logq - jnp.where(above, logp, 0), -1)
    return jnp.where(above, logp + jnp.log(-jnp.expm1(gap)), -jnp.inf)
