"""The static plan that a loop is compiled for, and the state that a round passes to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import sampling
from specjax.cache import KVCache
from specjax.decoding.draft_length import DraftLength, History
from specjax.drafters.base import Drafter, Sampling
from specjax.models.interface import LanguageModel

RUNNING, STOPPED, FULL = 0, 1, 2
"""A row's status: not ended, ended at a stop token or string, ended at its longest length."""


@dataclass(frozen=True)
class Plan:
    """What is fixed when a loop is compiled.

    `widths` are the window sizes a round can run at, ascending, the last one N + 1. `max_rounds`
    (R) bounds the recorded rounds. `overlaps` also records what share of p each verified node's
    distribution has, which costs one warp per node.
    """

    target: LanguageModel
    drafter: Drafter
    rule: str | sampling.Rule
    draft_length: DraftLength
    widths: tuple[int, ...]
    flags: sampling.WarpFlags
    capacity: int
    max_rounds: int
    chunk: int
    logprobs: bool = False
    overlaps: bool = False


@struct.dataclass
class Rows:
    """What the caller fixed for each row: its prompt's index in the input, key, and limits."""

    index: Int[Array, "B"]
    key: Key[Array, "B"]
    sampling: Sampling
    max_length: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]


@struct.dataclass
class Rounds:
    """Raw counts, one column per round; -1 where a row was finished already."""

    width: Int[Array | np.ndarray, "B R"]
    drafted: Int[Array | np.ndarray, "B R"]
    accepted: Int[Array | np.ndarray, "B R"]
    emitted: Int[Array | np.ndarray, "B R"]


@struct.dataclass
class State:
    """Everything that one round passes to the next.

    `tokens[b, :length[b]]` are committed, prompt first; `logprobs` are those of the committed
    tokens under the target, by position. `overlaps` are sum_x min(p, q) at the nodes that were
    reached, NaN elsewhere.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    status: Int[Array, "B"]
    cache: KVCache
    drafter: Any
    rows: Rows
    round: Int[Array, ""]
    rounds: Rounds
    history: History
    logprobs: Float[Array, "B S"] | None
    overlaps: Float[Array, "B R K"] | None

    @property
    def active(self) -> Bool[Array, "B"]:
        """Rows that still decode."""
        return self.status == RUNNING
