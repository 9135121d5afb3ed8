"""Rows that come and go: admitted into the slots of a running state, and released.

New rows are made apart by `loop.start`, for as many rows as are admitted together. Each row has its
own key, round counter, limits and counts, so that it decodes as it would alone.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Int

from specjax.cache import KVCache, Window
from specjax.decoding.state import STOPPED, State


def admit(state: State, slots: Int[Array, "A"], new: State) -> State:
    """The state with the A rows of `new` in `slots`; slots out of range are dropped.

    Both states are of one plan. What was in those slots is forgotten.
    """

    def put(into: Any, rows: Any) -> Any:
        if isinstance(into, KVCache | Window):
            return into.admit(slots, rows)
        return into.at[slots].set(rows, mode="drop")

    return jax.tree.map(put, state, new, is_leaf=_knows_its_rows)


def release(state: State, slots: Int[Array, "A"]) -> State:
    """The state without the rows in `slots`: they are finished, and their caches are empty."""

    def empty(part: Any) -> Any:
        return part.release(slots) if isinstance(part, KVCache) else part

    state = jax.tree.map(empty, state, is_leaf=_knows_its_rows)
    return state.replace(
        status=state.status.at[slots].set(STOPPED, mode="drop"),
        length=state.length.at[slots].set(1, mode="drop"),
        drafter=tuple(
            part.replace(unobserved=part.unobserved.at[slots].set(0, mode="drop"))
            for part in state.drafter
        ),
    )


def _knows_its_rows(node: Any) -> bool:
    return isinstance(node, KVCache | Window)
