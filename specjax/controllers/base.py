"""What a length controller is: a value with three pure functions, and a state beside it.

A controller is to a drafter what an optimizer is to a model. Before each step of the decoding loop
it names the step's limits; after the step it learns from the step's counts and its seconds. The
limits of a step are fixed before the step begins, so no choice depends on a token that the step
draws, and the output keeps the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int


class Limits(NamedTuple):
    """What each drafter may draft in the rounds of a step.

    `longest` is the longest draft of each drafter: tokens of a chain, or how many of a tree's first
    nodes are kept; 0 and the drafter does not run. `confidence` is the least probability of the
    likeliest next token at which a drafter that draws token after token continues.
    """

    longest: tuple[int, ...]
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class DrafterSizes:
    """What a controller knows of a drafter: the nodes N of its drafts, and whether it `stops`.

    A drafter that `stops` draws token after token and ends where its confidence is below the limit:
    each further token costs a pass of its own. Others make their whole draft at once.
    """

    num_nodes: int
    stops: bool = False


@dataclass(frozen=True)
class StepSizes:
    """What a step program was compiled for: its drafters, window widths (ascending) and rows.

    `dispatch_s` is about how many seconds a step takes beside its rounds on such a device, and
    `wide_is_cheap` says that a pass over several tokens takes about as long there as over one.
    """

    drafters: tuple[DrafterSizes, ...]
    widths: tuple[int, ...]
    num_rows: int
    dispatch_s: float = 0.0
    wide_is_cheap: bool = False


@dataclass(frozen=True)
class StepRecord:
    """What a step did; counts are over its rounds and rows.

    `seconds` are None where they say nothing (a step that waited for something else). `passes` are
    the rounds at each compiled width, `ran` the rounds in which each drafter ran, `further` the
    passes of each drafter after its first of a round. `drafted[i, n]` counts the rounds in which
    drafter i drafted node n in some row, and `accepted[i, n]` the rows' rounds in which it was
    accepted. `row_rounds` are the rounds of all rows together, `turns[i]` those of them that
    drafter i drafted in.
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
        """The rounds of the step."""
        return int(self.passes.sum())


@runtime_checkable
class Controller(Protocol):
    """A frozen value whose functions are pure; what it learns is in the state that they pass on."""

    def init(self, sizes: StepSizes) -> Any:
        """The state before the first step."""

    def choose(self, state: Any, unfinished: int, most_rounds: int) -> tuple[Limits, int, Any]:
        """The next step's limits with so many unfinished rows, its rounds, and the state.

        The rounds are at most `most_rounds`. Steps may be chosen while earlier ones are under way:
        `choose` is called once for each step, `update` once for each that has finished, in order.
        """

    def update(self, state: Any, record: StepRecord) -> Any:
        """The state after a step."""
