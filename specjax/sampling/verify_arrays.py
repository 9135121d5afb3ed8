"""Verification of a drafted chain whose distributions are given as arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt

from specjax.sampling.chain_verification import Verification, by_slot
from specjax.sampling.rules import RULES, Rule, Target
from specjax.sampling.tree_verification import chain_drafted

Keys = Key[Array, "..."] | UInt[Array, "..."] | np.integer | int
_NORMALISED = 1e-2
"""How far from 1 the sum of probabilities may be, in half precision too."""


def verify_chain(
    keys: Keys,
    tokens: Int[Array | np.ndarray, "*B K"],
    logq: Float[Array | np.ndarray, "*B K V"] | None,
    logp: Float[Array | np.ndarray, "*B K+1 V"],
    *,
    positions: Int[Array | np.ndarray, "*B"] | int | None = None,
    rule: str | Rule = "rejection",
    num_valid: Int[Array | np.ndarray, "*B"] | int | None = None,
) -> Verification:
    """Accept a prefix of a drafted chain and draw the token after it, exactly from p.

    Arrays describe one chain, or B chains along a leading axis: one call verifies [K] tokens or [B,
    K]. `logq[..., i, :]` is the log-probabilities that `tokens[..., i]` was drawn from, after all
    warping; None means that the tokens are deterministic. `logp[..., i, :]` is the target's warped
    log-probabilities at the position of `tokens[..., i]`, and `logp[..., K, :]` at the next
    position. Only the first `num_valid` tokens (by default K) were drafted.

    `keys` has one key per chain, used for nothing else unless the rule is `coupled`; a single key
    is split. A key is a result of `jax.random.key`, a legacy key of two words, or an integer.

    `rule` is a `Rule` or a name in `RULES`. `coupled` requires `positions`, the absolute position
    of each chain's first drafted token: its noise there is `position_gumbel(keys, position, V)`, so
    that plain decoding with the same keys gives the same tokens.

    Returns `num_accepted`, `next_token` and `path_slots`; `Verification.tokens(tokens)` are the
    tokens to emit. Raises ValueError for an unknown rule, missing positions, inconsistent shapes,
    invalid keys and, unless traced, for distributions that are not log-probabilities.
    """
    tokens, logp = jnp.asarray(tokens), jnp.asarray(logp)
    logq = None if logq is None else jnp.asarray(logq)
    rule = _rule(rule, positions)
    _check_shapes(tokens, logq, logp)
    for name, distributions in (("logq", logq), ("logp", logp)):
        if distributions is not None:
            _check_log_probabilities(name, distributions)
    one_chain = tokens.ndim == 1
    batch, length = (1, len(tokens)) if one_chain else tokens.shape
    vocab, keys = logp.shape[-1], _one_key_per_chain(keys, batch)
    num_valid = _one_per_chain("num_valid", length if num_valid is None else num_valid, batch)
    positions = _one_per_chain("positions", 0 if positions is None else positions, batch)
    _check_tokens(tokens.reshape(batch, length), num_valid, vocab)
    result = _verify_arrays(
        keys,
        tokens.reshape(batch, length),
        None if logq is None else logq.reshape(batch, length, vocab),
        logp.reshape(batch, length + 1, vocab),
        positions,
        num_valid,
        rule=rule,
    )
    return jax.tree.map(lambda part: part[0], result) if one_chain else result


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


def _rule(rule: str | Rule, positions: Any) -> Rule:
    """Return the rule of that name, or the rule itself."""
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is unknown: use one of {', '.join(RULES)}, or a Rule")
        rule = RULES[rule]
    if not isinstance(rule, Rule):
        raise ValueError(f"rule={rule!r}: use one of {', '.join(RULES)}, or a value of a Rule")
    if rule.position_noise and positions is None:
        raise ValueError(
            f"rule={rule.name!r} needs positions: pass those of the first drafted tokens"
        )
    return rule


def _check_shapes(tokens: Array, logq: Array | None, logp: Array) -> None:
    if tokens.ndim not in (1, 2) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}: pass whole numbers [K], or [B, K]"
        )
    *batch, length = tokens.shape
    if logp.ndim != tokens.ndim + 1 or logp.shape[:-1] != (*batch, length + 1):
        wanted = ", ".join(map(str, (*batch, length + 1, "V")))
        raise ValueError(
            f"logp has shape {logp.shape} for tokens {tokens.shape}: it must be ({wanted}), one "
            "distribution per token and one for the next"
        )
    if logq is not None and logq.shape != (*batch, length, logp.shape[-1]):
        raise ValueError(
            f"logq has shape {logq.shape}: it must be {(*batch, length, logp.shape[-1])}, one "
            "distribution for each token"
        )


def _check_log_probabilities(name: str, values: Array) -> None:
    """Raise ValueError for numbers that are no log-probabilities; a row of -inf has none at all."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"{name} is of {values.dtype}: pass log-probabilities, such as warp(...)")
    if isinstance(values, jax.core.Tracer) or not values.size:
        return
    with np.errstate(over="ignore"):
        mass = np.exp(np.asarray(values).astype(np.float32)).sum(axis=-1)
    off = ~((np.abs(mass - 1) < _NORMALISED) | (mass == 0))
    if off.any():
        index = tuple(np.argwhere(off)[0].tolist())
        raise ValueError(
            f"{name}[{', '.join(map(str, index))}]: its probabilities sum to {mass[index]:.4g}; "
            "pass log-probabilities, such as warp(logits, temperature) or jax.nn.log_softmax"
        )


def _one_per_chain(name: str, values: Any, batch: int) -> Int[Array, "B"]:
    """Return a whole number for each chain, from one for all or as many."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape not in ((), (batch,)):
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)}: pass a whole number, or {batch} of them"
        )
    return jnp.broadcast_to(values.astype(jnp.int32), batch)


def _check_tokens(tokens: Int[Array, "B K"], num_valid: Int[Array, "B"], vocab: int) -> None:
    """Raise ValueError for a drafted token without a probability, and for more tokens than K.

    What is being traced is not checked.
    """
    if isinstance(tokens, jax.core.Tracer) or isinstance(num_valid, jax.core.Tracer):
        return
    lengths = np.asarray(num_valid)
    if np.any((lengths < 0) | (lengths > tokens.shape[1])):
        raise ValueError(f"num_valid={lengths.tolist()}: use 0 to {tokens.shape[1]}, the length K")
    tokens = np.asarray(tokens)
    drafted = np.arange(tokens.shape[1])[None, :] < np.asarray(num_valid)[:, None]
    unknown = drafted & ((tokens < 0) | (tokens >= vocab))
    if unknown.any():
        raise ValueError(
            f"tokens has {tokens[unknown][0]}: use tokens from 0 to {vocab - 1}, or num_valid for "
            "chains that are shorter"
        )


def _one_key_per_chain(keys: Any, batch: int) -> Key[Array, "B"]:
    """Return the keys of B chains, from one key or as many, in any form that JAX takes."""
    given = keys
    if isinstance(keys, str) or keys is None:
        raise ValueError(f"keys={keys!r}: pass a key, made by jax.random.key, or a whole number")
    if isinstance(keys, int | np.integer) and not isinstance(keys, bool):
        keys = jax.random.key(keys)
    keys = jnp.asarray(keys)
    if keys.dtype == jnp.uint32 and keys.shape[-1:] == jax.random.PRNGKey(0).shape:
        keys = jax.random.wrap_key_data(keys)
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape not in ((), (batch,)):
        kind = getattr(given, "dtype", type(given).__name__)
        raise ValueError(
            f"keys are {kind}{list(jnp.shape(given))}: pass one key, made by jax.random.key, or "
            f"{batch} of them, made by jax.random.split"
        )
    return keys if keys.ndim else jax.random.split(keys, batch)
