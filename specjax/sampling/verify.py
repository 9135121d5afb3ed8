"""Verification of a drafted chain, given its distributions and the target's as arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.sampling.chain import Verification, by_slot
from specjax.sampling.rules import RULES, Rule, Target
from specjax.sampling.tree import chain_drafted


def verify_chain(
    keys: Key[Array, "B"] | Key[Array, ""],
    tokens: Int[Array, "B K"],
    logq: Float[Array, "B K V"] | None,
    logp: Float[Array, "B K+1 V"],
    *,
    positions: Int[Array, "B"] | None = None,
    rule: str | Rule = "rejection",
    num_valid: Int[Array, "B"] | None = None,
) -> Verification:
    """Accept a prefix of each row's drafted chain and draw the token after it, exactly from p.

    `logq[:, i]` is the log-probabilities that `tokens[:, i]` was drawn from, after all warping;
    None says the tokens are deterministic. `logp[:, i]` is the target's warped log-probabilities of
    the token at the position of `tokens[:, i]`, and `logp[:, K]` of the one after it.
    `num_valid[b]` (K by default) of row b's tokens were really drafted. `keys` are one per row,
    used for this call alone by every rule but `coupled`; a single key is split.

    `rule` is a `Rule` or the name of one in `RULES`. `coupled` needs `positions`, the absolute
    position of each row's first drafted token: its noise there is `position_gumbel(keys, position,
    V)`, so plain decoding with those keys gives the same tokens.

    Raises ValueError for an unknown rule, missing positions, or shapes that do not fit.
    """
    batch, length = tokens.shape
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is unknown: use one of {', '.join(RULES)}, or a Rule")
        rule = RULES[rule]
    if rule.position_noise and positions is None:
        raise ValueError(
            f"rule={rule.name!r} needs positions: pass those of the first drafted tokens"
        )
    if logp.ndim != 3 or logp.shape[:2] != (batch, length + 1):
        raise ValueError(
            f"logp has shape {logp.shape} for tokens {tokens.shape}: it must be "
            f"({batch}, {length + 1}, V), one distribution per token and one for the next"
        )
    if logq is not None and logq.shape != (batch, length, logp.shape[2]):
        raise ValueError(
            f"logq has shape {logq.shape}: it must be {(batch, length, logp.shape[2])}, one "
            "distribution for each token"
        )
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape not in ((), (batch,)):
        raise ValueError(
            f"keys have dtype {keys.dtype} and shape {keys.shape}: pass {batch} keys made by "
            "jax.random.key and jax.random.split, or one key"
        )
    if keys.ndim == 0:
        keys = jax.random.split(keys, batch)
    if num_valid is None:
        num_valid = jnp.full(batch, length, jnp.int32)
    if positions is None:
        positions = jnp.zeros(batch, jnp.int32)
    return _verify_arrays(keys, tokens, logq, logp, positions, num_valid, rule=rule)


@functools.partial(jax.jit, static_argnames="rule")
def _verify_arrays(
    keys: Key[Array, "B"],
    tokens: Int[Array, "B K"],
    logq: Float[Array, "B K V"] | None,
    logp: Float[Array, "B K+1 V"],
    positions: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    *,
    rule: Rule,
) -> Verification:
    drafted = chain_drafted(tokens, num_valid, logq)
    return rule.verify(keys, drafted, Target(by_slot(logp), positions, logp.shape[2], logp.dtype))
