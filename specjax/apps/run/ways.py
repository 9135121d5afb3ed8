"""Ways to decode the same requests: plainly, and with each drafter, in turn.

Speeds are compared between ways that take turns, so that a slow phase of the machine affects all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specjax.apps.command_line.console import Screen
from specjax.apps.rows.decode_report import PLAIN, Clock
from specjax.engine.engine import Engine
from specjax.engine.generate import Generation, open_engine
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import Request


@dataclass
class Way:
    """A way to decode: its name, its plan, and an engine once `open` was called."""

    name: str
    plan: DecodePlan
    engine: Engine | None = None

    def open(self, requests: Sequence[Request], screen: Screen, clock: Clock) -> Engine:
        """Return the engine; if there is none yet, compile one and run its first round.

        The round decodes some of `requests` and is discarded, since first rounds are slow. The
        seconds of compiling are added to `clock`.
        """
        if self.engine is None:
            begin = time.perf_counter()
            self.engine = open_engine(self.plan)
            name = "plain decoding" if self.name == PLAIN else self.name
            with screen.working(f"compiling {name}"):
                self.engine.compile()
            clock.compiled(self.name, time.perf_counter() - begin)
            _warm_up(self.plan, requests)
        return self.engine


def _warm_up(plan: DecodePlan, requests: Sequence[Request]) -> None:
    """Run one round of a plan's first requests and discard it, since first rounds are slow."""
    with open_engine(plan, 1) as engine:
        engine.submit(requests[: plan.options.batch_size])
        engine.step()


def turn_order(ways: int, repeat: int) -> list[int]:
    """Return the order in which a repeat (from 0) decodes in each of `ways` ways.

    Every other repeat runs backwards, so that a machine that slows down steadily affects all ways
    equally, and each pair of repeats starts with another way.
    """
    return np.roll(range(ways), -(repeat // 2))[:: -1 if repeat % 2 else 1].tolist()


def speedup_of(plain: Generation, drafted: Generation, *, with_prefill: bool = False) -> float:
    """Return the tokens/s of `drafted` divided by those of `plain`.

    Seconds of prefill count only with `with_prefill`.
    """

    def seconds_per_token(run: Generation) -> float:
        return (run.decode_s + with_prefill * run.prefill_s) / run.new_tokens

    return seconds_per_token(plain) / seconds_per_token(drafted)


def median_repeat(pairs: Sequence[tuple[Generation, Generation]]) -> int:
    """Return the index of the (plain, drafted) pair of results with the median speed-up.

    Of an even number of pairs, it is the lower of the two in the middle.
    """
    ratios = [speedup_of(plain, drafted) for plain, drafted in pairs]
    return sorted(range(len(pairs)), key=ratios.__getitem__)[(len(pairs) - 1) // 2]
