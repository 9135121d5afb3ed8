"""The interface of length controllers: values with three pure functions and a separate state.

A controller is to a drafter what an optimizer is to a model. Before each step of the decoding loop
it sets the step's limits, and after the step it learns from the counts and the time. Limits are
fixed before the step begins, so they depend on no token that the step draws, and the output keeps
the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int


class Limits(NamedTuple):
    """How much each drafter may draft in the rounds of a step.

    `longest` is each drafter's maximum number of tokens of a chain, or of a tree's first nodes;
    with 0 the drafter does not run. A drafter that drafts token by token stops if the most likely
    next token has a probability below `confidence`.
    """

    longest: tuple[int, ...]
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class DrafterSizes:
    """The number of nodes (N) of a drafter's drafts, and whether it can stop early.

    A drafter that `stops` drafts token by token, with a pass for each, and ends once its confidence
    is below the limit. Other drafters produce their whole draft at once. At most `longest_path` of
    the nodes are accepted in a round; by default any number.
    """

    num_nodes: int
    stops: bool = False
    longest_path: int | None = None


@dataclass(frozen=True)
class StepSizes:
    """The sizes that a step program was compiled for: drafters, window widths (ascending), rows.

    `dispatch_s` is the approximate overhead of a step on the device in seconds. `wide_is_cheap`
    means that a pass over several tokens takes about as long as a pass over one.
    """

    drafters: tuple[DrafterSizes, ...]
    widths: tuple[int, ...]
    num_rows: int
    dispatch_s: float = 0.0
    wide_is_cheap: bool = False


@dataclass(frozen=True)
class StepRecord:
    """The counts of a finished step over its rounds and rows, and its time.

    A row round is one round of one row. `seconds` is None if the time is meaningless (the step
    waited for something else). `passes` counts the rounds at each compiled width, `ran` the rounds
    in which each drafter ran, and `further` each drafter's passes after the first of a round.
    `drafted[i, n]` counts the rounds in which drafter i drafted node n in some row, and
    `accepted[i, n]` the row rounds in which it was accepted. `row_rounds` is the number of row
    rounds, and `turns[i]` how many of them drafter i drafted in.
    """

    limits: Limits
    seconds: float | None
    passes: Int[np.ndarray, "widths"]
    ran: Int[np.ndarray, "drafters"]
    further: Int[np.ndarray, "drafters"]
    drafted: Int[np.ndarray, "drafters N"]
    accepted: Int[np.ndarray, "drafters N"]
    turns: Int[np.ndarray, "drafters"]
    row_rounds: int

    @property
    def rounds(self) -> int:
        """The number of rounds of the step."""
        return int(self.passes.sum())


@runtime_checkable
class Controller(Protocol):
    """A frozen value with pure functions, which keep everything learned in a separate state."""

    def init(self, sizes: StepSizes) -> Any:
        """Return the state before the first step."""

    def choose(self, state: Any, unfinished: int, most_rounds: int) -> tuple[Limits, int, Any]:
        """Return the limits and the number of rounds of the next step, and the new state.

        `unfinished` is the number of unfinished rows; the number of rounds is at most
        `most_rounds`. Steps may be chosen while earlier ones are in progress: `choose` is called
        once per step, and `update` once per finished step, in order.
        """

    def update(self, state: Any, record: StepRecord) -> Any:
        """Return the state updated with the record of a finished step."""


@runtime_checkable
class LearnsCosts(Protocol):
    """A controller that also learns from steps which are timed once programs are compiled."""

    def know_costs(self, state: Any, records: Sequence[StepRecord]) -> Any:
        """Return the state with the costs in the records of such steps, plain ones first.

        What they draft and accept says nothing about requests.
        """
