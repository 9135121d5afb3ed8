"""Verification of a drafted chain: how many of its tokens are accepted, and the next token.

The functions here take explicit uniforms and noise; `verify_arrays` draws them from keys. Slot 0 is
the last committed token and slot i the i-th drafted one. A rule sees distributions through two
functions of slots: `target(slots)` is p and `draft(slots)` is q of the token that follows slot
`slots[b]` in row b. So a decoding loop warps the slots it visits and never all of [B, W, V].
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
"""A function from one slot of each row to the log-probabilities there."""


class Verification(NamedTuple):
    """The result of verifying a draft.

    `path_slots` are the window slots of the accepted nodes in order, -1 after them; `num_accepted`
    counts them; `next_token` is the target's own token that follows the last of them.
    """

    path_slots: Int[Array, "*B P"]
    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]

    def tokens(self, drafted: Int[Array, "*B N"]) -> Int[Array, "*B _"]:
        """Return what is emitted: the accepted ones of the `drafted` tokens, and the next token.

        Entries after them are -1.
        """
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
    """A rule's decision: the number of accepted tokens, and log-probabilities of the next one."""

    num_accepted: Int[Array, "B"]
    next_logp: Float[Array, "B V"]


def rejection(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Token-wise rejection sampling (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    Row b drafted `num_valid[b]` tokens, each from `draft` of the slot before it. They are accepted
    up to the first with u q >= p, or with q = 0, where the distribution of the next token is
    norm(max(0, p - q)); where all are accepted it is p. The loop visits one slot more than the row
    with the most accepted tokens accepts.
    """

    def visit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slots, walking, _ = state
        logp = target(slots)
        token = pick(tokens, slots)
        odds = log_ratio(pick(logp, token), pick(draft(slots), token))
        # In logarithms neither u q nor p / q can underflow; p = 0 is refused even at u = 0. So is
        # q = 0, which nothing is drawn from: where all of q is 0, what p has left is p.
        step = walking & (slots < num_valid) & (jnp.log(pick(uniforms, slots)) < odds)
        step &= jnp.isfinite(odds)
        return slots + step.astype(slots.dtype), step, logp

    slots, logp = _start(num_valid, target)
    slots, _, logp = lax.while_loop(
        lambda state: jnp.any(state[1]), visit, (slots, jnp.ones_like(slots, bool), logp)
    )
    refused = slots < num_valid
    return Decision(slots, jnp.where(refused[:, None], residual(logp, draft(slots)), logp))


def block(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    target: Distributions,
    draft: Distributions,
    uniforms: Float[Array, "B K"],
) -> Decision:
    """Block verification: accepts no fewer than `rejection` on average (Sun et al. 2403.10444).

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the accepted length is the largest i
    with u_i < h_i. There h_i = r / (r + 1 - w_i), r the sum of max(0, w_i p - q) over the
    distributions after x_i, and h_i = w_i at the row's own last token. The distribution of the
    next token is norm(max(0, w_i p - q)), or p after the last. It visits the slots of the longest
    valid draft while some row's w is above 0.
    """

    def visit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        slot, logw, accepted, next_logp = state
        slots = jnp.full_like(num_valid, slot)
        logp, logq = target(slots), draft(slots)
        weighted_excess = excess(logp + logw[:, None], logq)
        log_mass = logsumexp(weighted_excess, axis=-1)
        has_mass = log_mass > -jnp.inf
        last = slots == num_valid
        height = _block_height(log_mass, logw, last)
        accept = (slot == 0) | (pick(uniforms, slots - 1) < height)
        accept &= slots <= num_valid

        residual_logp = weighted_excess - jnp.where(has_mass, log_mass, 0)[:, None]
        logp_if_last_accepted = jnp.where((last | ~has_mass)[:, None], logp, residual_logp)
        token = pick(tokens, slots)
        odds = log_ratio(pick(logp, token), pick(logq, token))
        logw = _next_block_weight(logw, odds)
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


def _block_height(
    log_mass: Float[Array, "B"], logw: Float[Array, "B"], last: Bool[Array, "B"]
) -> Float[Array, "B"]:
    """Return h_i, from the logarithms of r and w_i; `last` marks rows at their last token."""
    mass, lost = jnp.exp(log_mass), -jnp.expm1(logw)  # lost = 1 - w
    inner = jnp.where(lost > 0, mass / jnp.where(lost > 0, mass + lost, 1), 1)
    return jnp.where(last, jnp.exp(logw), inner)


def _next_block_weight(logw: Float[Array, "B"], odds: Float[Array, "B"]) -> Float[Array, "B"]:
    """Return log w_i from log w_{i-1} and the logarithm of p(x_i) / q(x_i)."""
    alive = (logw > -jnp.inf) & jnp.isfinite(odds)
    return jnp.where(alive, jnp.minimum(jnp.where(alive, logw + odds, 0), 0), -jnp.inf)


def conclude(decision: Decision, gumbel: Float[Array, "B V"], longest: int) -> Verification:
    """Draw a decision's next token with Gumbel noise; `longest` is the length P of `path_slots`."""
    next_token = argmax(decision.next_logp + gumbel)
    return _verification(decision.num_accepted, next_token, longest)


def pick(rows: Shaped[Array, "B N *rest"], index: Int[Array, "B"]) -> Shaped[Array, "B *rest"]:
    """Return `rows[b, index[b]]` of each row b; an index out of range gives an arbitrary entry."""
    batch, count, *rest = rows.shape
    if not count:
        return jnp.zeros((batch, *rest), rows.dtype)
    index = index.reshape(batch, 1, *(1 for _ in rest))
    return jnp.take_along_axis(rows, index, axis=1, mode="clip")[:, 0]


def by_slot(rows: Float[Array, "B N V"]) -> Distributions:
    """Return the distributions by slot that an array holds."""
    return lambda slots: pick(rows, slots)


def draft_distributions(
    tokens: Int[Array, "B K"], logq_row: Int[Array, "B K"], logq: Float[Array, "B Q V"]
) -> Distributions:
    """Return a chain's distributions by slot.

    Node i was drawn from row `logq_row[:, i]` of `logq`; -1 stands for the one-hot distribution.
    """

    def distributions(slots: Int[Array, "B"]) -> Float[Array, "B V"]:
        row = pick(logq_row, slots)
        certain = _one_hot(pick(tokens, slots), logq.shape[-1], logq.dtype)
        return jnp.where((row < 0)[:, None], certain, pick(logq, jnp.maximum(row, 0)))

    return distributions


def one_hot_distributions(
    tokens: Int[Array, "B K"], vocab: int, dtype: jnp.dtype | type
) -> Distributions:
    """Return the distributions by slot of deterministic drafts: each token has probability 1."""
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
