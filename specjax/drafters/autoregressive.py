"""Drafting one token after another: what draft models, heads and early exits share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from specjax import trees
from specjax.drafters.base import Context, Drafter, Noise
from specjax.fields import Number, check_instance
from specjax.models.heads.draft_vocabulary import expand
from specjax.sampling import argmax
from specjax.trees import Draft

Step = Callable[[Int[Array, ""] | int, Int[Array, "B"], Any], tuple[Float[Array, "B Vd"], Any]]
"""(depth, the token there, carry) -> logits of the next token, carry. Depth 0 is the root."""

SampleMethod = Literal["probabilistic", "greedy"]
LeastProbability = Annotated[float, Number(0.0, 0.999999, remedy="use a number in [0, 1)")]
"""Of the likeliest token, for drafting to continue."""


@dataclass(frozen=True, kw_only=True)
class ChainDrafter(Drafter):
    """A drafter that drafts one token after another, drawn or the likeliest.

    `draft_sample_method` "probabilistic" draws each token under the row's own warp, from a
    distribution that the rules then know; "greedy" takes the likeliest. A row stops drafting where
    the likeliest token has a probability below `draft_p_min`. Raises InputError for bad options.
    """

    draft_sample_method: SampleMethod = "probabilistic"
    draft_p_min: LeastProbability = 0.0

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")

    @property
    def sampled(self) -> bool:
        """As `draft_sample_method` says."""
        return self.draft_sample_method == "probabilistic"

    def draft(
        self,
        step: Step,
        carry: Any,
        context: Context,
        noise: Noise,
        draft_ids: Int[Array, "Vd"] | None = None,
    ) -> tuple[Draft, Any]:
        """`draft_chain` of up to K tokens, with this drafter's options."""
        return draft_chain(
            self.num_speculative_tokens,
            step,
            carry,
            context,
            noise,
            sampled=self.sampled,
            p_min=self.draft_p_min,
            draft_ids=draft_ids,
        )


def draft_chain(
    longest: int,
    step: Step,
    carry: Any,
    context: Context,
    noise: Noise,
    *,
    sampled: bool = True,
    p_min: float = 0.0,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> tuple[Draft, Any]:
    """A chain of up to `longest` tokens per row, drawn from `step`, or its likeliest.

    A row stops at its limit, or where the likeliest next token has a probability below `p_min`
    (before any warp, and before the token is drawn: the draft stays exact). The loop ends with its
    longest row. Where `step` gives logits of a part of the vocabulary, `draft_ids` say which.
    """
    batch, most = context.length.shape[0], longest
    keeps_logq = sampled and context.needs_logq and most > 0
    root = context.token_at(context.length - 1)

    def grow(depth: Int[Array, ""] | int, state: tuple) -> tuple:
        token, count, tokens, distributions, carry = state
        logits, carry = step(depth, token, carry)
        wanted = depth < context.limit
        if p_min > 0:
            confidence = jnp.exp(logits.max(axis=-1) - logsumexp(logits, axis=-1))
            wanted &= confidence >= p_min
        count = jnp.where((count == depth) & wanted, count + 1, count)
        token, distribution = choose(
            logits, context, noise, depth, sampled=sampled, draft_ids=draft_ids
        )
        if keeps_logq:
            distributions = lax.dynamic_update_slice(
                distributions, distribution[:, None], (0, depth, 0)
            )
        if most:
            tokens = lax.dynamic_update_slice(tokens, token[:, None], (0, depth))
        return token, count, tokens, distributions, carry

    distributions = jnp.zeros((batch, most, context.target.vocab_size)) if keeps_logq else None
    tokens, count = jnp.zeros((batch, most), jnp.int32), jnp.zeros(batch, jnp.int32)
    state = grow(0, (root, count, tokens, distributions, carry))

    def going(loop: tuple) -> Array:
        depth, (_, count, *_) = loop
        return (depth < most) & jnp.any(count == depth)

    def more(loop: tuple) -> tuple:
        depth, state = loop
        return depth + 1, grow(depth, state)

    _, (_, count, tokens, distributions, carry) = lax.while_loop(going, more, (jnp.int32(1), state))
    return trees.chain(tokens, count, distributions), carry


def choose(
    logits: Float[Array, "B Vd"],
    context: Context,
    noise: Noise,
    depth: Int[Array, ""] | int,
    *,
    sampled: bool,
    draft_ids: Int[Array, "Vd"] | None,
) -> tuple[Int[Array, "B"], Float[Array, "B V"] | None]:
    """One token per row and its distribution where it is `sampled`; else the likeliest, None."""
    if sampled and context.flags.sampled:
        return context.draw(expand(logits, draft_ids, context.target.vocab_size), noise, depth)
    token = argmax(logits)
    return (token if draft_ids is None else draft_ids[token]), None
