"""Penalties on tokens that have occurred before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Num

from specjax.core.processor import NewRows, Processor


@struct.dataclass
class PenaltyState:
    """Each row's penalties, the tokens that its prompt has, and the counts of those of its output.

    The penalties are those of vLLM's sampling parameters of the same names, or 1, 0 and 0.
    """

    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    in_prompt: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


@dataclass(frozen=True)
class Penalties(Processor):
    """Repetition, presence and frequency penalties, as vLLM defines them.

    The logit of each token that the prompt or the output has is divided by the repetition penalty
    if it is above 0, else multiplied by it (CTRL, 1909.05858, as in Hugging Face's transformers).
    From the logit of each token that the output has c times, c times the frequency penalty and, if
    c > 0, the presence penalty are subtracted (OpenAI's definitions, which leave the prompt out).
    """

    forbids: ClassVar[bool] = False

    def init(self, rows: NewRows) -> PenaltyState:
        """Return the state after the prompts, with the penalties in `rows.requested`, by name."""
        none = jnp.zeros((len(rows.tokens), rows.vocab_size), jnp.int32)
        in_prompt = _counted(none, rows.tokens, rows.prompt_length) > 0
        return PenaltyState(**rows.requested, in_prompt=in_prompt, counts=none)

    def advance(
        self, state: PenaltyState, tokens: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> PenaltyState:
        """Return the state with the first `count[b]` of `tokens[b]` counted."""
        return state.replace(counts=_counted(state.counts, tokens, count))

    def apply(self, state: PenaltyState, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the penalised logits."""

        def column(penalty: Float[Array, "B"]) -> Num[Array, "B 1"]:
            return penalty[:, None].astype(logits.dtype)

        in_output = state.counts > 0
        factor = jnp.where(state.in_prompt | in_output, column(state.repetition), 1)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        logits -= column(state.frequency) * state.counts.astype(logits.dtype)
        return logits - jnp.where(in_output, column(state.presence), 0)


def _counted(
    counts: Int[Array, "B V"], tokens: Int[Array, "B T"], count: Int[Array, "B"]
) -> Int[Array, "B V"]:
    """Return counts of tokens after the first `count[b]` of `tokens[b]`."""
    new = (jnp.arange(tokens.shape[1])[None, :] < count[:, None]).astype(counts.dtype)
    return jax.vmap(lambda row, ids, added: row.at[ids].add(added))(counts, tokens, new)
