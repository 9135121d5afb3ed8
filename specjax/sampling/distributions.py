"""Two distributions over the next token: acceptance, overlap, residual; and draws of siblings.

p is the target's distribution and q the drafter's; both are passed as log-probabilities.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from specjax.sampling.argument_checks import (
    check_log_probabilities,
    check_two_distributions,
    one_key_per_row,
)


def acceptance_probability(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """Return min(1, p/q) of each token: the probability that it is accepted if it is drafted.

    The result is 0 where p = 0, and 1 where q = 0 < p. Raises ValueError for arrays of different
    shapes and, unless traced, for values that are not log-probabilities. (Leviathan et al.
    2211.17192.)
    """
    check_two_distributions(logp, logq)
    return jnp.exp(jnp.minimum(log_ratio(logp, logq), 0))


def overlap(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Return the sum of min(p, q) = 1 - TV(p, q), the probability that a draft is accepted.

    Raises ValueError for arrays of different shapes and, unless traced, for values that are not
    log-probabilities.
    """
    check_two_distributions(logp, logq)
    return jnp.sum(jnp.exp(jnp.minimum(logp, logq)), axis=-1)


def residual(
    logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]
) -> Float[Array, "*rows V"]:
    """Return the log-probabilities norm(max(0, p - q)) of the token that replaces a rejected one.

    Where p = q, so that there is no residual, the result is p. Raises ValueError for arrays of
    different shapes and, unless traced, for values that are not log-probabilities.
    """
    check_two_distributions(logp, logq)
    excess_logp = excess(logp, logq)
    log_mass = logsumexp(excess_logp, axis=-1, keepdims=True)
    return jnp.where(
        log_mass > -jnp.inf, excess_logp - jnp.where(log_mass > -jnp.inf, log_mass, 0), logp
    )


def log_ratio(logp: Float[Array, "*rows"], logq: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return log(p / q): -inf where p = 0, and +inf where q = 0 < p."""
    possible = logp > -jnp.inf
    return jnp.where(possible, jnp.where(possible, logp, 0) - logq, -jnp.inf)


def excess(logp: Float[Array, "*rows V"], logq: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
    """Return log(max(0, p - q)); p and q need not be normalized."""
    above = logp > logq
    gap = jnp.where(above, logq - jnp.where(above, logp, 0), -1)
    return jnp.where(above, logp + jnp.log(-jnp.expm1(gap)), -jnp.inf)


def draw_siblings(
    key: Any, logq: Float[Array | np.ndarray, "*rows V"], count: int, *, replace: bool = False
) -> Int[Array, "*rows count"]:
    """Draw `count` tokens from each distribution, in the order in which rules test siblings.

    `key` is a typed JAX key, a legacy uint32 key or an integer seed. Tokens are drawn without
    replacement, as `verify_tree` expects, or independently if `replace` is set. If fewer than
    `count` tokens of a distribution have positive probability, they come first, and the others,
    whose probability is 0, are never accepted by `rejection`. Raises ValueError for an invalid key,
    for values that are not log-probabilities, and for a `count` outside 1 to V.
    """
    logq = jnp.asarray(logq)
    if not logq.ndim:
        raise ValueError("logq is one number: pass log-probabilities [V], or [..., V]")
    check_log_probabilities("logq", logq)
    vocab = logq.shape[-1]
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 < count <= vocab:
        raise ValueError(f"count={count!r}: use a whole number from 1 to V = {vocab}")
    # One key suffices for all rows: JAX draws different noise for each of them.
    key = one_key_per_row(key, 1)[0]
    shape = (count, *logq.shape[:-1])
    drawn = jax.random.categorical(key, logq, shape=shape, replace=replace, mode="high")
    return jnp.moveaxis(drawn, 0, -1).astype(jnp.int32)
