"""Controllers that do not learn: a fixed length, a length by batch size, recorded limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.controllers.base import Limits, StepRecord, StepSizes

_ROUNDS = 4
"""The rounds of a step of `ByBatch`, after which it counts unfinished rows again."""


@dataclass(frozen=True)
class Fixed:
    """A controller that limits each drafter to `longest` nodes, by default all of its nodes.

    Raises ValueError for a negative number.
    """

    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None:
            _check_length("Fixed.longest", self.longest)

    def init(self, sizes: StepSizes) -> StepSizes:
        """Return the sizes, which are the whole state."""
        return sizes

    def choose(
        self, state: StepSizes, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, StepSizes]:
        """Return the same limits for every step, `most_rounds`, and the state unchanged."""
        del unfinished
        return _up_to(state, self.longest), most_rounds, state

    def update(self, state: StepSizes, record: StepRecord) -> StepSizes:
        """Return the state unchanged."""
        del record
        return state


@dataclass(frozen=True)
class ByBatch:
    """A controller that sets the draft length by the number of unfinished rows.

    Each entry (low, high, longest) of `table` applies to low to high unfinished rows at the start
    of a step. For other numbers of rows the length is `longest`, by default all nodes. Raises
    ValueError for negative numbers and entries of another form.
    """

    table: tuple[tuple[int, int, int], ...]
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None:
            _check_length("ByBatch.longest", self.longest)
        for step in self.table if isinstance(self.table, Sequence) else [self.table]:
            if not isinstance(step, Sequence) or len(step) != 3:
                raise ValueError(f"ByBatch.table has {step!r}: use steps of (low, high, longest)")
            for number in step:
                _check_length("ByBatch.table", number)

    def init(self, sizes: StepSizes) -> StepSizes:
        """Return the sizes, which are the whole state."""
        return sizes

    def choose(
        self, state: StepSizes, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, StepSizes]:
        """Return the limits for `unfinished` rows, a number of rounds, and the state unchanged.

        The number is small, since rows may finish, after which another length may apply.
        """
        steps = (longest for low, high, longest in self.table if low <= unfinished <= high)
        return _up_to(state, next(steps, self.longest)), min(most_rounds, _ROUNDS), state

    def update(self, state: StepSizes, record: StepRecord) -> StepSizes:
        """Return the state unchanged."""
        del record
        return state


@dataclass(frozen=True)
class Recorded:
    """A controller that replays the limits and rounds of an earlier run's steps in order.

    After the last step nothing is drafted. Raises ValueError for steps of another form.
    """

    steps: tuple[tuple[Limits, int], ...]

    def __post_init__(self) -> None:
        for step in self.steps if isinstance(self.steps, Sequence) else [self.steps]:
            pair = isinstance(step, Sequence) and len(step) == 2
            if not pair or not isinstance(step[0], Limits) or not step[1] > 0:
                raise ValueError(
                    f"Recorded.steps has {step!r:.80}: use steps of (Limits, rounds), as "
                    "Generation.step_limits has them"
                )

    def init(self, sizes: StepSizes) -> tuple[StepSizes, int]:
        """Return the sizes, and the number of steps chosen so far."""
        return sizes, 0

    def choose(
        self, state: tuple[StepSizes, int], unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, tuple[StepSizes, int]]:
        """Return the recorded limits and number of rounds of the next step, and the new state."""
        del unfinished
        sizes, chosen = state
        if chosen >= len(self.steps):
            return _up_to(sizes, 0), most_rounds, state
        limits, rounds = self.steps[chosen]
        return limits, min(rounds, most_rounds), (sizes, chosen + 1)

    def update(self, state: tuple[StepSizes, int], record: StepRecord) -> tuple[StepSizes, int]:
        """Return the state unchanged, since `choose` counts the steps."""
        del record
        return state


def _check_length(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={value!r}: use a whole number of at least 0")


def _up_to(sizes: StepSizes, longest: int | None) -> Limits:
    """Return limits that allow each drafter `longest` nodes, by default all, at any confidence."""
    counts = [drafter.num_nodes for drafter in sizes.drafters]
    most = counts if longest is None else [min(count, longest) for count in counts]
    return Limits(tuple(most), (0.0,) * len(counts))
