"""Overlap, ratio and residual of the target's distribution p and the draft's q of a token."""

from __future__ import annotations

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float


def acceptance_probability(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """Return min(1, p/q) of each token: the probability of accepting it once drafted.

    It is 0 where p = 0, and otherwise 1 where q = 0. (Leviathan et al. 2211.17192.)
    """
    return jnp.exp(jnp.minimum(log_ratio(logp, logq), 0))


def overlap(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Return sum of min(p, q) = 1 - TV(p, q), the probability that a draft is accepted."""
    return jnp.sum(jnp.exp(jnp.minimum(logp, logq)), axis=-1)


def residual(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """Return the log-probabilities norm(max(0, p - q)) of the token after a rejected draft.

    If p = q, returns p.
    """
    excess_logp = excess(logp, logq)
    log_mass = logsumexp(excess_logp, axis=-1, keepdims=True)
    return jnp.where(
        log_mass > -jnp.inf, excess_logp - jnp.where(log_mass > -jnp.inf, log_mass, 0), logp
    )


def log_ratio(logp: Float[Array, "*rows"], logq: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return log(p / q): -inf if p = 0, otherwise +inf if q = 0."""
    possible = logp > -jnp.inf
    return jnp.where(possible, jnp.where(possible, logp, 0) - logq, -jnp.inf)


def excess(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Return log(max(0, p - q)); neither p nor q need be normalized."""
    above = logp > logq
    gap = jnp.where(above, logq - jnp.where(above, logp, 0), -1)
    return jnp.where(above, logp + jnp.log(-jnp.expm1(gap)), -jnp.inf)
