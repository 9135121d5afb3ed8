"""Verification of a drafted chain: how many tokens are accepted, and the token that follows.

The functions here are deterministic: uniforms and Gumbel noise are arguments, which `verify_arrays`
draws from keys. Slot 0 is the last committed token and slot i the i-th drafted one. Distributions
are passed as two functions of one slot per row: `target(slots)` returns p and `draft(slots)`
returns q for the token after slot `slots[b]` of row b. A decoding loop therefore applies
temperature and top-k only at the slots that are visited, and never to all of [B, W, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.sampling.distributions import excess, log_ratio, residual
from specjax.sampling.warp import argmax

Distributions = Callable[[Int[Array, "B"]], Float[Array, "B V"]]
"""A function from one slot per row to the log-probabilities of the token after it."""


class Verification(NamedTuple):
    """The result of verifying a draft.

    `path_slots` are the window slots of the accepted nodes in order, padded with -1; `num_accepted`
    counts them; `next_token` is the target's token that follows the last of them.
    """

    path_slots: Int[Array, "*B P"]
    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]

    def tokens(self, drafted: Int[Array, "*B N"]) -> Int[Array, "*B _"]:
        """Return the tokens to emit, padded with -1.

        These are the accepted ones of the `drafted` tokens, followed by the next token. Raises
        ValueError for fewer drafted tokens than were verified.
        """
        verified = self.path_slots.shape[-1]
        if 0 < jnp.shape(drafted)[-1] < verified:
            raise ValueError(
                f"drafted has {jnp.shape(drafted)[-1]} tokens, and {verified} were verified: pass "
                "all tokens that verify_chain or verify_tree got"
            )
        path_slots = jnp.concatenate(
            [self.path_slots, jnp.full_like(self.next_token[..., None], -1)], axis=-1
        )
        if not jnp.size(drafted):
            return self.next_token[..., None]
        index = jnp.maximum(path_slots - 1, 0)
        accepted = jnp.take_along_axis(jnp.asarray(drafted), index, axis=-1)
        accepted = jnp.where(path_slots > 0, accepted, -1)
        position = jnp.broadcast_to(jnp.arange(path_slots.shape[-1]), path_slots.shape)
        is_next = position == self.num_accepted[..., None]
        return jnp.where(is_next, self.next_token[..., None], accepted)


class Decision(NamedTuple):
    """The number of accepted tokens of each row, and the log-probabilities of its next token."""

    num_accepted: Int[Array, "B"]
    next_logp: Float[Array, "B V"]


def rejection(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Apply token-wise rejection sampling (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    In row b, `num_valid[b]` tokens were drafted, each from `draft` at the slot before it. Tokens
    are accepted up to the first for which u q >= p or q = 0, where u is its uniform. The next token
    is then distributed as norm(max(0, p - q)), or as p if all drafted tokens were accepted. On a
    CPU one slot more is visited than the largest number of accepted tokens in any row. On
    accelerators all are, since a loop that waits for data costs more there than arithmetic.
    """
    draw = tokens, num_valid, target, draft, uniforms
    return lax.platform_dependent(
        cpu=lambda: rejection_by_slot(*draw), default=lambda: rejection_at_once(*draw)
    )


def rejection_at_once(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Return the result of `rejection`, with the distributions of all slots in memory."""
    length = tokens.shape[1]
    slots = jnp.arange(length + 1, dtype=num_valid.dtype)

    def at_every(distributions: Distributions, slots: Int[Array, " S"]) -> Float[Array, "B S V"]:
        at = jax.vmap(lambda slot: distributions(jnp.full_like(num_valid, slot)), out_axes=1)
        return at(slots)

    logp = at_every(target, slots)
    accepted = jnp.zeros_like(num_valid)
    if length:
        logq = at_every(draft, slots[:-1])
        odds = log_ratio(
            *(
                jnp.take_along_axis(rows, tokens[:, :, None], axis=2)[:, :, 0]
                for rows in (logp[:, :-1], logq)
            )
        )
        step = (slots[None, :-1] < num_valid[:, None]) & (jnp.log(uniforms) < odds)
        step &= jnp.isfinite(odds)
        accepted = jnp.cumprod(step.astype(num_valid.dtype), axis=1).sum(axis=1)
        accepted = accepted.astype(num_valid.dtype)
    return _after_accepted(accepted, num_valid, pick(logp, accepted), draft)


def rejection_by_slot(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Return the result of `rejection`, by a loop over the slots that are reached."""

    def visit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slots, walking, _ = state
        logp = target(slots)
        token = pick(tokens, slots)
        odds = log_ratio(pick(logp, token), pick(draft(slots), token))
        # In logarithms neither u q nor p / q can underflow; p = 0 is refused even at u = 0. So is
        # q = 0, from which nothing is drawn; if q is 0 everywhere, the residual is p.
        step = walking & (slots < num_valid) & (jnp.log(pick(uniforms, slots)) < odds)
        step &= jnp.isfinite(odds)
        return slots + step.astype(slots.dtype), step, logp

    slots, logp = _start(num_valid, target)
    slots, _, logp = lax.while_loop(
        lambda state: jnp.any(state[1]), visit, (slots, jnp.ones_like(slots, bool), logp)
    )
    return _after_accepted(slots, num_valid, logp, draft)


def _after_accepted(
    accepted: Int[Array, "B"],
    num_valid: Int[Array, "B"],
    logp: Float[Array, "B V"],
    draft: Distributions,
) -> Decision:
    """Return the decision to accept so many tokens, given p at the slot after them."""
    refused = accepted < num_valid
    return Decision(accepted, jnp.where(refused[:, None], residual(logp, draft(accepted)), logp))


def block(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Apply block verification, which accepts no fewer tokens than `rejection` on average.

    Let w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)). The accepted length is the largest i with
    u_i < h_i, where h_i = r / (r + 1 - w_i) and r is the sum of max(0, w_i p - q) over the
    vocabulary after x_i; at the row's last drafted token h_i = w_i. The next token is distributed
    as norm(max(0, w_i p - q)), or as p after the last drafted token. The loop visits the slots of
    the longest valid draft while w > 0 in some row. (Sun et al. 2403.10444.)
    """

    def visit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        slot, logw, accepted, next_logp = state
        slots = jnp.full_like(num_valid, slot)
        logp, logq = target(slots), draft(slots)
        weighted_excess = excess(logp + logw[:, None], logq)
        log_mass = logsumexp(weighted_excess, axis=-1)
        has_mass = log_mass > -jnp.inf
        last = slots == num_valid
        height = block_height(log_mass, logw, last)
        accept = (slot == 0) | (pick(uniforms, slots - 1) < height)
        accept &= slots <= num_valid

        residual_logp = weighted_excess - jnp.where(has_mass, log_mass, 0)[:, None]
        logp_if_last_accepted = jnp.where((last | ~has_mass)[:, None], logp, residual_logp)
        token = pick(tokens, slots)
        odds = log_ratio(pick(logp, token), pick(logq, token))
        logw = next_block_weight(logw, odds)
        return (
            slot + 1,
            logw,
            jnp.where(accept, slots, accepted),
            jnp.where(accept[:, None], logp_if_last_accepted, next_logp),
        )

    def unfinished(state: tuple[Array, ...]) -> Bool[Array, ""]:
        slot, logw, _, _ = state
        return jnp.any((slot <= num_valid) & (logw > -jnp.inf))

    slots, next_logp = _start(num_valid, target)
    slot, logw = jnp.zeros((), slots.dtype), jnp.zeros(slots.shape, next_logp.dtype)
    _, _, accepted, next_logp = lax.while_loop(unfinished, visit, (slot, logw, slots, next_logp))
    return Decision(accepted, next_logp)


def block_height(
    log_mass: Float[Array, "B"], logw: Float[Array, "B"], last: Bool[Array, "B"]
) -> Float[Array, "B"]:
    """Return h_i = r / (r + 1 - w_i) of block verification, or w_i in rows marked `last`.

    `log_mass` is log r, and `logw` is log w_i; `block` defines them.
    """
    mass, lost = jnp.exp(log_mass), -jnp.expm1(logw)  # lost = 1 - w
    inner = jnp.where(lost > 0, mass / jnp.where(lost > 0, mass + lost, 1), 1)
    return jnp.where(last, jnp.exp(logw), inner)


def next_block_weight(logw: Float[Array, "B"], odds: Float[Array, "B"]) -> Float[Array, "B"]:
    """Return log w_i = min(0, log w_{i-1} + `odds`) of block verification.

    `logw` is log w_{i-1}, and `odds` is the logarithm of p(x_i) / q(x_i). The result is -inf if
    `odds` is infinite, since p or q is then 0.
    """
    alive = (logw > -jnp.inf) & jnp.isfinite(odds)
    return jnp.where(alive, jnp.minimum(jnp.where(alive, logw + odds, 0), 0), -jnp.inf)


def conclude(decision: Decision, gumbel: Float[Array, "B V"], longest: int) -> Verification:
    """Draw each row's next token from its decision, and return the complete result.

    The draw is argmax(next_logp + gumbel). `longest` (P) is the length of `path_slots` in the
    result.
    """
    next_token = argmax(decision.next_logp + gumbel)
    return _verification(decision.num_accepted, next_token, longest)


def pick(rows: Shaped[Array, "B N *rest"], index: Int[Array, "B"]) -> Shaped[Array, "B *rest"]:
    """Return `rows[b, index[b]]` for each row b; an index out of range gives an arbitrary entry."""
    batch, count, *rest = rows.shape
    if not count:
        return jnp.zeros((batch, *rest), rows.dtype)
    index = index.reshape(batch, 1, *(1 for _ in rest))
    return jnp.take_along_axis(rows, index, axis=1, mode="clip")[:, 0]


def by_slot(rows: Float[Array, "B N V"]) -> Distributions:
    """Return a function from one slot per row to the row's distribution at that slot of `rows`."""
    return lambda slots: pick(rows, slots)


def draft_distributions(
    tokens: Int[Array, "B K"], logq_row: Int[Array, "B K"], logq: Float[Array, "B Q V"]
) -> Distributions:
    """Return a function from one slot per row to the draft distribution of the token after it.

    Token i of row b was drawn from `logq[b, logq_row[b, i]]`; an index of -1 marks a token that was
    chosen without drawing, whose distribution is one-hot.
    """

    def distributions(slots: Int[Array, "B"]) -> Float[Array, "B V"]:
        row = pick(logq_row, slots)
        certain = _one_hot(pick(tokens, slots), logq.shape[-1], logq.dtype)
        return jnp.where((row < 0)[:, None], certain, pick(logq, jnp.maximum(row, 0)))

    return distributions


def one_hot_distributions(
    tokens: Int[Array, "B K"], vocab: int, dtype: jnp.dtype | type
) -> Distributions:
    """Return a function from one slot per row to the one-hot distribution of the token after it."""
    return lambda slots: _one_hot(pick(tokens, slots), vocab, jnp.dtype(dtype))


def _one_hot(tokens: Int[Array, "B"], vocab: int, dtype: jnp.dtype) -> Float[Array, "B V"]:
    is_token = jnp.arange(vocab)[None, :] == tokens[:, None]
    return jnp.where(is_token, 0.0, -jnp.inf).astype(dtype)


def _start(
    num_valid: Int[Array, "B"], target: Distributions
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    slots = jnp.zeros_like(num_valid)
    distribution = jax.eval_shape(target, slots)
    return slots, jnp.zeros(distribution.shape, distribution.dtype)


def _verification(
    accepted: Int[Array, "B"], next_token: Int[Array, "B"], longest: int
) -> Verification:
    depth = jnp.arange(longest, dtype=accepted.dtype)[None, :]
    path = jnp.where(depth < accepted[:, None], depth + 1, -1)
    return Verification(path, accepted, next_token.astype(jnp.int32))
