"""Logits of a growing draft after processors, which see the path to each of its tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.draft_vocabulary import expand
from specjax.core.drafter import Context
from specjax.core.growth.level import Level, Step
from specjax.core.processor import advanced


@struct.dataclass
class Paths:
    """The tokens on the paths to the tokens of the latest level, and the inner step's carry."""

    tokens: Int[Array, "B T P"]
    carry: Any


def after_processors(
    longest: int,
    logits: Float[Array, "B 1 Vd"],
    step: Step,
    carry: Any,
    context: Context,
    draft_ids: Int[Array, "Vd"] | None,
) -> tuple[Float[Array, "B 1 V"], Step, Paths]:
    """Return the arguments of a draft with logits after the context's processors.

    They are those of the whole vocabulary, one entry for each token of a level. What a draft
    chooses, or draws, is then what the processors make likely. Paths have up to `longest` tokens.
    """
    batch = len(context.length)

    def processed(
        logits: Float[Array, "B #T Vd"], paths: Int[Array, "B T P"], depth: Int[Array, ""] | int
    ) -> Float[Array, "B T V"]:
        whole = expand(logits, draft_ids, context.target.vocab_size)
        whole = jnp.broadcast_to(whole, (*paths.shape[:2], whole.shape[2]))
        count = jnp.broadcast_to(jnp.asarray(depth, jnp.int32), batch)

        def of_one(logits: Float[Array, "B V"], path: Int[Array, "B P"]) -> Float[Array, "B V"]:
            states = advanced(context.processors, context.processor_states, path, count)
            for processor, state in zip(context.processors, states, strict=True):
                logits = processor.apply(state, logits)
            return logits

        return jax.vmap(of_one, in_axes=1, out_axes=1)(whole, paths)

    def processed_step(level: Level, before: Paths) -> tuple[Float[Array, "B T V"], Paths]:
        logits, carry = step(level, before.carry)
        tokens = jnp.take_along_axis(before.tokens, level.parents[:, :, None], axis=1)
        at_depth = jnp.arange(longest) == jnp.asarray(level.depth) - 1
        tokens = jnp.where(at_depth[None, None], level.tokens[:, :, None], tokens)
        return processed(logits, tokens, level.depth), Paths(tokens, carry)

    none = jnp.zeros((batch, 1, longest), jnp.int32)
    return processed(logits, none, 0), processed_step, Paths(none, carry)
