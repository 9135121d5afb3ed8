"""The lengths of drafts: what a length controller chooses for a step, and what it learns from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from specjax import controllers
from specjax.controllers import LearnsCosts, StepRecord
from specjax.core.drafter import StepLimits
from specjax.core.round import different_tokens
from specjax.core.state import Seen
from specjax.distributed import processes
from specjax.engine.plan import DecodePlan
from specjax.engine.programs import Programs, row_arguments
from specjax.engine.requests import Request, SamplingParams
from specjax.errors import InputError, shown
from specjax.fields import INT32_MAX

_ROUNDS = 4
"""The rounds of a timed step where a round is fast; one where it is slow."""
_SLOW_S = 0.1
"""The seconds of a plain round from which on rounds are slow."""
_PROMPT_TOKENS = 2
"""How often a timed row's token is repeated: twice, as some heads draft nothing after one."""


class LengthControl:
    """The controller of a plan, and the state that it has learned."""

    def __init__(self, plan: DecodePlan) -> None:
        self._controller = plan.options.length_controller
        self._num_drafters = len(plan.loop.drafter.parts)
        self._costs_are_known = False
        self.state = self._controller.init(plan.step_sizes)

    def know_costs(self, timed_steps: Callable[[], Sequence[StepRecord]]) -> None:
        """Let a controller that learns from costs know, once, those of the compiled programs."""
        if not self._costs_are_known:
            self._costs_are_known = True
            if isinstance(self._controller, LearnsCosts):
                self.state = self._controller.know_costs(self.state, timed_steps())

    def choose(self, unfinished: int, most_rounds: int) -> tuple[controllers.Limits, int]:
        """Return the limits and the number of rounds that the controller chooses for a step.

        All processes use the choice of process 0. Raises InputError if the controller returns
        anything else than valid limits, a number of rounds and a state.
        """
        chosen = self._controller.choose(self.state, unfinished, most_rounds)
        if not _is_choice(chosen, self._num_drafters, most_rounds):
            raise InputError(
                f"controller={shown(self._controller, 80)}: choose returned {shown(chosen, 120)}; "
                f"return (Limits, rounds, state) with the limits of {self._num_drafters} "
                f"drafter(s) and 1 to {most_rounds} rounds"
            )
        *chosen, self.state = chosen
        (longest, confidence), rounds = processes.from_first(chosen)
        return controllers.Limits(tuple(longest), tuple(confidence)), rounds

    def learn(self, record: StepRecord) -> None:
        """Let the controller learn from a finished step."""
        self.state = self._controller.update(self.state, record)


def _is_choice(chosen: Any, num_drafters: int, most_rounds: int) -> bool:
    """Return whether a controller's choice has valid limits, a number of rounds, and a state."""
    if not isinstance(chosen, tuple) or len(chosen) != 3:
        return False
    if not isinstance(chosen[0], controllers.Limits):
        return False
    (longest, confidence), rounds, _ = chosen
    wholes = (*longest, rounds)
    return (
        len(longest) == len(confidence) == num_drafters
        and all(isinstance(number, int | np.integer) and number >= 0 for number in wholes)
        and all(isinstance(number, float | int | np.number) for number in confidence)
        and 1 <= rounds <= most_rounds
    )


def step_record(
    plan: DecodePlan, limits: controllers.Limits, seen: Seen, seconds: float
) -> StepRecord:
    """Return the record of a step that the length controller learns from."""
    ran = seen.rounds.emitted >= 0
    widths = np.where(ran, seen.rounds.width, 0).max(axis=0)
    drafters = np.arange(len(plan.loop.drafter.parts))
    return StepRecord(
        limits=limits,
        seconds=seconds,
        passes=(widths[:, None] == np.array(plan.loop.widths)).sum(axis=0),
        ran=seen.tally.ran,
        further=seen.tally.further,
        drafted=seen.tally.drafted,
        accepted=seen.tally.accepted,
        turns=(seen.rounds.drafter[..., None] == drafters).sum(axis=(0, 1)),
        row_rounds=int(ran.sum()),
    )


def time_steps(plan: DecodePlan, programs: Programs) -> Iterator[StepRecord]:
    """Time each compiled width, without a draft, and each drafter with a draft of the first width.

    Yields their records, plain steps first. Where rounds are fast, one plain step has a single
    round, which tells the overhead of a step from its passes. Drafters that draft token by token
    are timed with one token too, which tells the cost of the first one from that of the others.
    Rows have different prompts, since equal ones would read the same few experts of a target that
    has some, and decode in a state of their own, which is dropped.
    """
    params = plan.params
    sampling = SamplingParams(max_new_tokens=INT32_MAX, ignore_eos=True)
    tokens = different_tokens(plan.num_rows, 1, plan.loop.target.vocab_size).tolist()
    rows = [Request(0, (token,) * _PROMPT_TOKENS, sampling) for (token,) in tokens]
    # What the rows decode does not matter, so that their first token stays unread.
    state = programs.empty(params, *row_arguments(plan, rows))
    ended, everyone = np.zeros(plan.num_rows, bool), np.int32(plan.num_rows + 1)
    pages = None
    if plan.loop.page_size is not None:  # no row has one
        shape = plan.num_rows, plan.loop.capacity // plan.loop.page_size
        pages = np.full(shape, plan.loop.num_pages, np.int32)
    none = np.zeros(len(plan.loop.drafter.parts), np.int32)
    sleeping = StepLimits(none, np.zeros(len(none), np.float32))

    def timed(limits: StepLimits, rounds: int) -> StepRecord:
        nonlocal state
        begin = time.perf_counter()
        state, packed = programs.step(
            params, state, limits, ended, np.int32(rounds), everyone, pages
        )
        jax.block_until_ready(packed)
        seconds = time.perf_counter() - begin
        longest, confidence = limits.longest.tolist(), limits.confidence.tolist()
        names = controllers.Limits(tuple(longest), tuple(confidence))
        return step_record(plan, names, packed.read(), seconds)

    def measured(limits: StepLimits, rounds: int) -> StepRecord:
        """Return the faster of two steps, the first of which may find caches and threads cold."""
        both = [timed(limits, rounds) for _ in range(2)]
        return min(both, key=lambda record: record.seconds)

    rounds = 1 if timed(sleeping, 1).seconds > _SLOW_S else _ROUNDS
    if rounds > 1:
        yield measured(sleeping, 1)
    for width in plan.loop.widths:
        yield measured(sleeping.replace(least_width=np.int32(width)), rounds)
    short = next((width - 1 for width in plan.loop.widths if width > 1), 0)
    for number, part in enumerate(plan.loop.drafter.parts):
        if not part.num_nodes:
            continue
        most = min(short, part.num_nodes)
        for length in sorted({1, most}) if part.stops else [most]:
            longest = np.where(np.arange(len(none)) == number, length, 0).astype(np.int32)
            yield measured(replace(sleeping, longest=longest), rounds)
