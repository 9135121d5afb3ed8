"""Statistics of an engine: tokens, seconds, occupancy of slots, and request latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specjax.engine.outputs import Times

_KEPT = 100_000
"""The number of latest steps and times that are kept, so that memory use is bounded."""


class Step(NamedTuple):
    """A step of rounds: its duration, its end in seconds after the engine's creation, and counts.

    `row_rounds` is the sum over rows of the rounds in which each decoded; `waiting` is the number
    of waiting requests at the start.
    """

    end_s: float
    seconds: float
    rounds: int
    row_rounds: int
    tokens: int
    waiting: int


class Percentiles(NamedTuple):
    """The median and two high percentiles of durations in seconds; None without data."""

    p50: float | None
    p95: float | None
    p99: float | None

    def __str__(self) -> str:
        """Return the percentiles on one line."""
        return ", ".join(
            f"{name} {_number(value, '.3f')}" for name, value in self._asdict().items()
        )

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Percentiles:
        """Return the percentiles of `seconds`."""
        values = list(seconds)
        if not values:
            return cls(None, None, None)
        return cls(*(float(value) for value in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True)
class EngineSummary:
    """Totals of an engine; fractions and percentiles cover its last 100,000 steps or requests.

    `requests` counts finished samples, and `aborted` those that were aborted. `tokens` counts the
    tokens of all outputs, emitted in `rounds` of the compiled loop. `prefill_s`, `decode_s` and
    `compile_s` do not overlap; `tokens_per_second` divides by the first two, which include time
    that the caller spends between steps. `occupancy` is the fraction of slots that decoded, over
    all slots and rounds, and `occupancy_waiting` the same over steps that began with waiting
    requests (None if there were none). Percentiles are of seconds since a request was added:
    `waiting` until its prompt began to be read, `first_token`, and `total` until its end, without
    aborted requests. `between_tokens` is the time between two reads of a request's tokens, divided
    by the number of tokens read. `prompt_tokens` were read before their rows decoded, and
    `shared_tokens` were found in pages instead; `reread_tokens` of the former were found, too, but
    no state of recurrent layers had been kept after them. `put_back` counts how often a row was
    preempted: it gave up its pages, and waited until it could be read again.
    """

    requests: int
    aborted: int
    tokens: int
    rounds: int
    prefill_s: float
    decode_s: float
    compile_s: float
    prompt_tokens: int
    shared_tokens: int
    reread_tokens: int
    put_back: int
    tokens_per_second: float | None
    occupancy: float | None
    occupancy_waiting: float | None
    waiting: Percentiles
    first_token: Percentiles
    between_tokens: Percentiles
    total: Percentiles

    def __str__(self) -> str:
        """Return a small table."""
        aborted = f", {self.aborted} of them aborted" if self.aborted else ""
        shared = f", {self.shared_tokens} more found in pages" if self.shared_tokens else ""
        if self.reread_tokens:
            shared += f"; {self.reread_tokens} found without a state after them, and read again"
        busy = f"{_number(self.occupancy, '.0%')} of slots and rounds"
        if self.occupancy_waiting is not None:
            busy += f", {self.occupancy_waiting:.0%} while requests waited"
        lines = {
            "requests": f"{self.requests}{aborted}",
            "new tokens": f"{self.tokens} in {self.rounds} rounds",
            "tokens/s": _number(self.tokens_per_second, ".1f"),
            "decoding, s": f"{self.decode_s:.2f}",
            "prefill, s": f"{self.prefill_s:.2f}",
            "compiling, s": f"{self.compile_s:.2f}",
            "prompt tokens read": f"{self.prompt_tokens}{shared}",
            "occupancy": busy,
            "rows put back": str(self.put_back),
            "waiting, s": str(self.waiting),
            "first token, s": str(self.first_token),
            "between tokens, s": str(self.between_tokens),
            "total, s": str(self.total),
        }
        return "\n".join(f"{name:<20}{value}" for name, value in lines.items())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


@dataclass(repr=False)
class Statistics:
    """Counts of an engine with `num_slots` slots, updated as it runs; `summary` has their totals.

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
    prompt_tokens: int = 0
    shared_tokens: int = 0
    reread_tokens: int = 0
    put_back: int = 0
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT))
    waiting_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    between_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    total_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def __repr__(self) -> str:
        """Return the numbers of slots, requests and tokens; the lists of steps may be long."""
        return (
            f"Statistics({self.num_slots} slots, {self.requests} finished requests, {self.tokens} "
            f"new tokens in {self.rounds} rounds)"
        )

    def add_step(self, step: Step) -> None:
        """Add the counts and seconds of a finished step."""
        self.tokens += step.tokens
        self.rounds += step.rounds
        self.decode_s += step.seconds
        if step.rounds:
            self.steps.append(step)

    def add_request(self, times: Times, *, aborted: bool = False) -> None:
        """Add the latencies of a finished or aborted sample."""
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
        """The new tokens divided by the seconds of prefill and decoding; None before any work."""
        seconds = self.prefill_s + self.decode_s
        return self.tokens / seconds if seconds else None

    def summary(self) -> EngineSummary:
        """Return the totals since the engine was created."""
        return EngineSummary(
            requests=self.requests,
            aborted=self.aborted,
            tokens=self.tokens,
            rounds=self.rounds,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            compile_s=self.compile_s,
            prompt_tokens=self.prompt_tokens,
            shared_tokens=self.shared_tokens,
            reread_tokens=self.reread_tokens,
            put_back=self.put_back,
            tokens_per_second=self.tokens_per_second,
            occupancy=self._occupancy(self.steps),
            occupancy_waiting=self._occupancy(step for step in self.steps if step.waiting),
            waiting=Percentiles.of(self.waiting_s),
            first_token=Percentiles.of(self.first_token_s),
            between_tokens=Percentiles.of(self.between_tokens_s),
            total=Percentiles.of(self.total_s),
        )

    def _occupancy(self, steps: Iterable[Step]) -> float | None:
        """Return the fraction of slots that decoded, over all rounds; None without rounds."""
        steps = list(steps)
        rounds = sum(step.rounds for step in steps)
        busy = sum(step.row_rounds for step in steps)
        return busy / (self.num_slots * rounds) if rounds else None
