"""What an engine has done: tokens, seconds, how full its slots were, and how long requests took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specjax.decoding.engine.outputs import Times

_KEPT = 100_000
"""The newest steps and times that are kept, so that memory stays flat."""


class Step(NamedTuple):
    """A step of rounds: when it ended, in seconds since the engine was made, and what was in it.

    `row_rounds` counts each row in each of the `rounds` that it decoded in; `waiting` are the
    requests that waited when the step began.
    """

    end_s: float
    seconds: float
    rounds: int
    row_rounds: int
    tokens: int
    waiting: int


class Percentiles(NamedTuple):
    """The median and two high percentiles of some seconds; None where there were none."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """The percentiles of `seconds`."""
        values = list(seconds)
        if not values:
            return cls(None, None, None)
        return cls(*(float(value) for value in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True)
class EngineSummary:
    """An engine's totals. Shares and percentiles are of its newest 100,000 steps or requests.

    `requests` counts the samples that have ended, and `aborted` those of them that were aborted.
    `tokens` are those of all outputs, in `rounds` of the compiled loop. `prefill_s`, `decode_s` and
    `compile_s` are seconds apart from each other; `tokens_per_second` is over the first two, which
    pass also while the caller does something between two steps. `occupancy` is the share of slots
    that decoded, over all slots and rounds; `occupancy_waiting` is that share over the steps that
    began while requests waited, None without such a step. Percentiles of seconds since a request
    was added: `waiting`, until its prompt began to be read; `first_token`; `total`, until its end,
    without aborted ones. `between_tokens` are the seconds between two reads of a request's tokens,
    divided by the tokens that came together.
    """

    requests: int
    aborted: int
    tokens: int
    rounds: int
    prefill_s: float
    decode_s: float
    compile_s: float
    tokens_per_second: float | None
    occupancy: float | None
    occupancy_waiting: float | None
    waiting: Percentiles
    first_token: Percentiles
    between_tokens: Percentiles
    total: Percentiles


@dataclass
class Statistics:
    """Counts of an engine with `num_slots` slots, which it adds to as it runs.

    `lossy` says that the rule changed the distribution of some request's tokens.
    """

    num_slots: int
    lossy: bool = False
    requests: int = 0
    aborted: int = 0
    tokens: int = 0
    rounds: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    compile_s: float = 0.0
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT))
    waiting_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    between_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    total_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add_step(self, step: Step) -> None:
        """Count a step of rounds."""
        self.tokens += step.tokens
        self.rounds += step.rounds
        self.decode_s += step.seconds
        if step.rounds:
            self.steps.append(step)

    def add_request(self, times: Times, *, aborted: bool = False) -> None:
        """Count a sample that has ended, or was aborted."""
        self.requests += 1
        self.aborted += aborted
        if times.waiting_s is not None:
            self.waiting_s.append(times.waiting_s)
        if times.first_token_s is not None:
            self.first_token_s.append(times.first_token_s)
        if not aborted:
            self.total_s.append(times.total_s)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens over the seconds of prefill and decoding; None before there are any."""
        seconds = self.prefill_s + self.decode_s
        return self.tokens / seconds if seconds else None

    def summary(self) -> EngineSummary:
        """The totals so far."""
        return EngineSummary(
            requests=self.requests,
            aborted=self.aborted,
            tokens=self.tokens,
            rounds=self.rounds,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            compile_s=self.compile_s,
            tokens_per_second=self.tokens_per_second,
            occupancy=self._occupancy(self.steps),
            occupancy_waiting=self._occupancy(step for step in self.steps if step.waiting),
            waiting=Percentiles.of(self.waiting_s),
            first_token=Percentiles.of(self.first_token_s),
            between_tokens=Percentiles.of(self.between_tokens_s),
            total=Percentiles.of(self.total_s),
        )

    def _occupancy(self, steps: Iterable[Step]) -> float | None:
        steps = list(steps)
        rounds = sum(step.rounds for step in steps)
        busy = sum(step.row_rounds for step in steps)
        return busy / (self.num_slots * rounds) if rounds else None
