"""Drafting of what has to follow: tokens that processors know, such as those of a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax import trees
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Context, Drafter, Noise
from specjax.core.processor import Processor
from specjax.fields import check_instance
from specjax.methods.method import Method
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class Forced(Drafter):
    """A drafter of the tokens that processors say are next (`Processor.draft`), without a model.

    In a grammar these are the longest tokens of a text that has to follow, such as the keys of an
    object, and the only token where one alone is allowed.
    """

    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = 8

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Propose tokens as long as a processor knows the next one."""
        del params, noise
        known = [
            (processor, of_rows)
            for processor, of_rows in zip(context.processors, context.processor_states, strict=True)
            if type(processor).draft is not Processor.draft
        ]
        batch, longest = len(context.length), self.num_speculative_tokens
        tokens, count = jnp.zeros((batch, longest), jnp.int32), jnp.zeros(batch, jnp.int32)
        if not known:
            return trees.chain(tokens, count), state
        processors, states = zip(*known, strict=True)

        def next_token(depth: Int[Array, ""], found: tuple[Any, ...]) -> tuple[Any, ...]:
            states, tokens, count = found
            token = jnp.full(batch, -1)
            for processor, of_rows in zip(processors, states, strict=True):
                own = processor.draft(of_rows)
                token = jnp.where(own >= 0, own, token)
            goes_on = (count == depth) & (token >= 0) & (depth < context.limit)
            token, one = jnp.maximum(token, 0)[:, None].astype(jnp.int32), goes_on.astype(jnp.int32)
            states = [
                processor.advance(of_rows, token, one)
                for processor, of_rows in zip(processors, states, strict=True)
            ]
            tokens = lax.dynamic_update_slice(tokens, token, (0, depth))
            return tuple(states), tokens, count + one

        _, tokens, count = lax.fori_loop(0, longest, next_token, (states, tokens, count))
        return trees.chain(tokens, count), state


FORCED = Method(name="forced", paper="", drafter=Forced, joined_in_all=False, in_all=False)
