"""Constraints by a grammar: tables of which tokens may follow in each state of an output."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int16

from specjax.core.processor import NewRows, Processor, one_by_one


@struct.dataclass
class GrammarState:
    """Each row's table, a `grammars.TokenTable`, and where its output is in it.

    The first `width[b]` entries of `successors[b]` are those of state 0, and so on. `state` is -1
    after a token that is not allowed. The row has `emitted` new tokens, and may have `room`.
    """

    classes: Int[Array, "B V"]
    successors: Int16[Array, "B entries"]
    width: Int[Array, "B"]
    least: Int[Array, "B states"]
    drafts: Int[Array, "B states"]
    room: Int[Array, "B"]
    state: Int[Array, "B"]
    emitted: Int[Array, "B"]


@dataclass(frozen=True)
class Grammar(Processor):
    """Forbids tokens after which the output could not be completed in the language of a grammar.

    Nor could it be if too few tokens were left for the row's limit. Tables have up to `num_states`
    states and `num_classes` classes of tokens, and together up to `num_entries` entries: one has
    many states or many classes, seldom both.
    """

    num_states: int = 1
    num_classes: int = 1
    num_entries: int = 1

    def init(self, rows: NewRows) -> GrammarState:
        """Return the state of rows without output; `rows.requested` are the first six arrays."""
        none = jnp.zeros_like(rows.prompt_length)
        return GrammarState(**rows.requested, state=none, emitted=none)

    def advance(
        self, state: GrammarState, tokens: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> GrammarState:
        """Return the state after the first `count[b]` of `tokens[b]`."""

        def step(at: Int[Array, "B"], token: Int[Array, "B"]) -> Int[Array, "B"]:
            return _after(state.replace(state=at), token)

        return state.replace(
            state=one_by_one(step, state.state, tokens, count), emitted=state.emitted + count
        )

    def apply(self, state: GrammarState, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logits, -inf for tokens that are not allowed."""
        every = jnp.broadcast_to(jnp.arange(self.num_classes), (len(logits), self.num_classes))
        allowed = _fits(state, _successors(state, every))
        allowed = jnp.take_along_axis(allowed, state.classes, axis=1)
        return jnp.where(allowed, logits, -jnp.inf)

    def allows(self, state: GrammarState, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return whether each row's token is allowed."""
        return _fits(state, _after(state, tokens)[:, None])[:, 0]

    def draft(self, state: GrammarState) -> Int[Array, "B"]:
        """Return the token by which a text that has to follow continues, if there is one."""
        drafts = jnp.take_along_axis(state.drafts, jnp.maximum(state.state, 0)[:, None], axis=1)
        return jnp.where(state.state < 0, -1, drafts[:, 0])


def _successors(state: GrammarState, classes: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Return the state after a token of each of the classes, -1 where it is not allowed."""
    at = state.state[:, None] * state.width[:, None] + classes
    known = (state.state >= 0)[:, None] & (classes < state.width[:, None])
    found = jnp.take_along_axis(state.successors, jnp.where(known, at, 0), axis=1)
    return jnp.where(known, found.astype(jnp.int32), -1)


def _after(state: GrammarState, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return each row's state after one more token, -1 if it is not allowed."""
    classes = jnp.take_along_axis(state.classes, tokens[:, None], axis=1)
    return _successors(state, classes)[:, 0]


def _fits(state: GrammarState, successors: Int[Array, "B n"]) -> Bool[Array, "B n"]:
    """Return whether an output can be completed after one more token, within the row's limit."""
    least = jnp.take_along_axis(state.least, jnp.maximum(successors, 0), axis=1)
    room = (state.room - state.emitted - 1)[:, None]
    return (successors >= 0) & (least <= room)
