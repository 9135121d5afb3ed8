"""The state that a round passes to the next, and what the host sees of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.cache import KVCache, Window
from specjax.drafters.base import Sampling

RUNNING, STOPPED, FULL, FAILED = 0, 1, 2, 3
"""A row's status: not ended, ended at a stop token or string, at its longest length, or before a
token whose logits are not numbers."""


@struct.dataclass
class Rows:
    """What the caller fixed for each row: its prompt's index in the input, key, and limits."""

    index: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    key: Key[Array, "B"]
    sampling: Sampling
    max_length: Int[Array, "B"]
    stop_ids: Int[Array, "B stops"]


@struct.dataclass
class Rounds:
    """Raw counts, by row, of one round or of several in columns; -1 where the row had none.

    `width` is the window's slots, `drafted` counts nodes, and `drafter` is the number of the
    drafter whose they are (also -1 where nothing was drafted). `overlaps`, where they are recorded,
    are sum_x min(p, q) at the nodes that were reached, NaN elsewhere.
    """

    width: Int[Array | np.ndarray, "B *R"]
    drafted: Int[Array | np.ndarray, "B *R"]
    accepted: Int[Array | np.ndarray, "B *R"]
    emitted: Int[Array | np.ndarray, "B *R"]
    drafter: Int[Array | np.ndarray, "B *R"]
    overlaps: Float[Array | np.ndarray, "B *R K"] | None = None


@struct.dataclass
class Tally:
    """What the drafters did in the rounds of a step, summed up over rounds and rows.

    `ran` are the rounds in which each ran, `further` its passes after the first of a round.
    `drafted[i, n]` counts the rounds in which drafter i drafted node n in some row, and
    `accepted[i, n]` the rows' rounds in which it was accepted.
    """

    ran: Int[Array | np.ndarray, "drafters"]
    further: Int[Array | np.ndarray, "drafters"]
    drafted: Int[Array | np.ndarray, "drafters N"]
    accepted: Int[Array | np.ndarray, "drafters N"]


@struct.dataclass
class State:
    """Everything that one round passes to the next.

    `tokens[b, :length[b]]` are committed, prompt first; `logprobs` are those of the committed
    tokens under the target, by position, where the plan asks for them. `round` counts each row's
    own rounds. `features` are those that drafters have yet to observe, as `Context.features` holds
    them. `undrafted` rows draft no more: the logits after a draft were not numbers, and only those
    without one say whether the row has failed. Every leaf has rows as its first axis, or belongs to
    a cache or a window.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    status: Int[Array, "B"]
    undrafted: Bool[Array, "B"]
    cache: KVCache
    drafter: Any
    features: dict[str, Float[Array, "B M D"]]
    rows: Rows
    round: Int[Array, "B"]
    logprobs: Float[Array, "B S"]

    @property
    def active(self) -> Bool[Array, "B"]:
        """Rows that still decode."""
        return self.status == RUNNING


@struct.dataclass
class Seen:
    """What the host sees of a step: the rows after it, and what it added to them.

    `tokens[b, i]` is the i-th new token of row b, if it had so many, and `logprobs` its
    log-probability, where the plan asks for those.
    """

    status: Int[Array | np.ndarray, "B"]
    tokens: Int[Array | np.ndarray, "B M"]
    logprobs: Float[Array | np.ndarray, "B M"] | None
    rounds: Rounds
    tally: Tally


def admit(state: State, slots: Int[Array, "A"], new: State) -> State:
    """The state with the A rows of `new` in `slots`; slots out of range are dropped.

    Both states are of one plan. What was in those slots is forgotten.
    """
    slots = _in_range(state, slots)

    def put(into: Any, rows: Any) -> Any:
        if knows_its_rows(into):
            return into.admit(slots, rows)
        return into.at[slots].set(rows, mode="drop")

    return jax.tree.map(put, state, new, is_leaf=knows_its_rows)


def take(state: State, slots: Int[Array, "A"]) -> State:
    """The state of the rows in A slots."""

    def of(part: Any) -> Any:
        return part.take(slots) if knows_its_rows(part) else part[slots]

    return jax.tree.map(of, state, is_leaf=knows_its_rows)


def release(state: State, slots: Int[Array, "A"]) -> State:
    """The state without the rows in `slots`: they are finished, and their caches are empty."""
    slots = _in_range(state, slots)

    def empty(part: Any) -> Any:
        return part.release(slots) if isinstance(part, KVCache) else part

    state = jax.tree.map(empty, state, is_leaf=knows_its_rows)
    return state.replace(
        status=state.status.at[slots].set(STOPPED, mode="drop"),
        length=state.length.at[slots].set(1, mode="drop"),
        drafter=tuple(
            part.replace(unobserved=part.unobserved.at[slots].set(0, mode="drop"))
            for part in state.drafter
        ),
    )


def _in_range(state: State, slots: Int[Array, "A"]) -> Int[Array, "A"]:
    """Slots, of which negative ones would count from the end: they are out of range instead."""
    return jnp.where(slots < 0, len(state.length), slots)


def knows_its_rows(node: Any) -> bool:
    """Whether a part of a state is a cache or a window, not an array with rows first."""
    return isinstance(node, KVCache | Window)
