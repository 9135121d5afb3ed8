"""Biases of tokens, and constraints on which tokens may come next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import put
from specjax.core.processor import NewRows, Processor


@dataclass(frozen=True)
class TokenBias(Processor):
    """Adds a number to the logit of each token: OpenAI's logit bias, and -inf for banned tokens."""

    def init(self, rows: NewRows) -> Float[Array, "B V"]:
        """Return the biases of all tokens, `rows.requested`."""
        return rows.requested

    def apply(self, state: Float[Array, "B V"], logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the sum of logits and biases."""
        return logits + state

    def allows(self, state: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return whether the bias of each row's token is finite."""
        return jnp.take_along_axis(state, tokens[:, None], axis=1)[:, 0] > -jnp.inf


@struct.dataclass
class MinTokensState:
    """Each row's least number of new tokens, the tokens that would end it, and how many it has.

    `stop_ids` are padded with -1.
    """

    least: Int[Array, "B"]
    stop_ids: Int[Array, "B stops"]
    emitted: Int[Array, "B"]


@dataclass(frozen=True)
class MinTokens(Processor):
    """Forbids the tokens that end a row until it has a number of new tokens."""

    def init(self, rows: NewRows) -> MinTokensState:
        """Return the state of rows without output; `rows.requested` are `least` and `stop_ids`."""
        return MinTokensState(**rows.requested, emitted=jnp.zeros_like(rows.prompt_length))

    def advance(
        self, state: MinTokensState, tokens: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> MinTokensState:
        """Return the state with `count[b]` more tokens in row b."""
        del tokens
        return state.replace(emitted=state.emitted + count)

    def apply(self, state: MinTokensState, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logits, -inf for the tokens that must not end the row yet."""
        banned = (state.emitted < state.least)[:, None] & (state.stop_ids >= 0)
        return _without(logits, state.stop_ids, banned)

    def allows(self, state: MinTokensState, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return whether each row's token would not end it too early."""
        ends = (state.stop_ids == tokens[:, None]).any(axis=1)
        return ~ends | (state.emitted >= state.least)


@struct.dataclass
class NgramState:
    """Each row's size of n-grams that do not repeat (0: off), and its tokens so far."""

    size: Int[Array, "B"]
    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


@dataclass(frozen=True)
class NoRepeatNgrams(Processor):
    """Forbids the last token of each n-gram that would occur twice in prompt and output.

    This is `no_repeat_ngram_size` of Hugging Face's transformers.
    """

    def init(self, rows: NewRows) -> NgramState:
        """Return the state after the prompts; `rows.requested` are the sizes."""
        return NgramState(rows.requested, rows.tokens, rows.prompt_length)

    def advance(
        self, state: NgramState, tokens: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> NgramState:
        """Return the state with the first `count[b]` of `tokens[b]` appended."""
        step = jnp.arange(tokens.shape[1])[None, :]
        at = state.length[:, None] + step
        at = jnp.where(step < count[:, None], at, state.tokens.shape[1])
        return state.replace(tokens=put(state.tokens, at, tokens), length=state.length + count)

    def apply(self, state: NgramState, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logits, -inf for the tokens that would complete a second equal n-gram."""
        return _without(logits, state.tokens, _completes(state))

    def allows(self, state: NgramState, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return whether each row's token completes no second equal n-gram."""
        return ~(_completes(state) & (state.tokens == tokens[:, None])).any(axis=1)


def _completes(state: NgramState) -> Bool[Array, "B S"]:
    """Return a mask of the tokens after which the row's next token would repeat an n-gram.

    Those are the last tokens of n-grams whose first n - 1 tokens are the latest of the row.
    """
    position = jnp.arange(state.tokens.shape[1])[None, :]

    def matches(back: Int[Array, ""], found: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        latest = jnp.maximum(state.length - back, 0)[:, None]
        latest = jnp.take_along_axis(state.tokens, latest, axis=1)
        equal = (jnp.roll(state.tokens, back, axis=1) == latest) & (position >= back)
        return found & (equal | (back >= state.size[:, None]))

    # A row with fewer tokens than an n-gram has none.
    size = jnp.where(state.size <= state.length, state.size, 0)
    last = (position < state.length[:, None]) & (size[:, None] > 0)
    return lax.fori_loop(1, jnp.max(size), matches, last)


@struct.dataclass
class ForcedState:
    """The tokens with which each row's output begins, padded with -1, and its number of tokens."""

    tokens: Int[Array, "B S"]
    emitted: Int[Array, "B"]


@dataclass(frozen=True)
class ForcedTokens(Processor):
    """Lets the output begin with given tokens, whatever their logits are."""

    forbids: ClassVar[bool] = False

    def init(self, rows: NewRows) -> ForcedState:
        """Return the state of rows without output; `rows.requested` are the tokens."""
        return ForcedState(rows.requested, jnp.zeros_like(rows.prompt_length))

    def advance(
        self, state: ForcedState, tokens: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> ForcedState:
        """Return the state with `count[b]` more tokens in row b."""
        del tokens
        return state.replace(emitted=state.emitted + count)

    def apply(self, state: ForcedState, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logits, 0 for the forced token of a row and then -inf for all others."""
        forced = _forced(state)[:, None]
        chosen = jnp.arange(logits.shape[1])[None, :] == forced
        alone = jnp.where(chosen, 0, -jnp.inf).astype(logits.dtype)
        return jnp.where(forced < 0, logits, alone)

    def allows(self, state: ForcedState, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return whether each row's token is the forced one, if there is one."""
        forced = _forced(state)
        return (forced < 0) | (forced == tokens)

    def draft(self, state: ForcedState) -> Int[Array, "B"]:
        """Return each row's forced token, if there is one."""
        return _forced(state)


def _forced(state: ForcedState) -> Int[Array, "B"]:
    """Return each row's next token if it is forced, else -1."""
    at = state.emitted[:, None]
    return jnp.take_along_axis(state.tokens, at, axis=1, mode="fill", fill_value=-1)[:, 0]


def _without(
    logits: Float[Array, "B V"], tokens: Int[Array, "B T"], banned: Bool[Array, "B T"]
) -> Float[Array, "B V"]:
    """Return the logits, -inf for the `banned` ones of each row's `tokens`."""
    at = jnp.where(banned, tokens, logits.shape[1])
    return put(logits, at, jnp.full(at.shape, -jnp.inf, logits.dtype))
