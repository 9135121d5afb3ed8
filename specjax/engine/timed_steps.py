"""Records of steps: those that requests decode in, and some that are timed after compiling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from specjax import controllers
from specjax.controllers import StepRecord
from specjax.core.drafter import Limits
from specjax.core.state import Seen
from specjax.engine.programs import Programs
from specjax.engine.rows import Row, row_arguments
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.session import Session
from specjax.fields import INT32_MAX

_ROUNDS = 4
"""The rounds of a timed step where a round is fast; one where it is slow."""
_SLOW_S = 0.1
"""The seconds of a plain round from which on rounds are slow."""
_PROMPT = (1, 1)
"""The tokens of the rows that are timed: two, since some heads draft nothing after one."""


def step_record(
    session: Session, limits: controllers.Limits, seen: Seen, seconds: float
) -> StepRecord:
    """Return the record of a step that the length controller learns from."""
    ran = seen.rounds.emitted >= 0
    widths = np.where(ran, seen.rounds.width, 0).max(axis=0)
    drafters = np.arange(len(session.plan.drafter.parts))
    return StepRecord(
        limits=limits,
        seconds=seconds,
        passes=(widths[:, None] == np.array(session.plan.widths)).sum(axis=0),
        ran=seen.tally.ran,
        further=seen.tally.further,
        drafted=seen.tally.drafted,
        accepted=seen.tally.accepted,
        turns=(seen.rounds.drafter[..., None] == drafters).sum(axis=(0, 1)),
        row_rounds=int(ran.sum()),
    )


def time_steps(session: Session, programs: Programs) -> Iterator[StepRecord]:
    """Time each compiled width, without a draft, and each drafter with a draft of the first width.

    Yields their records, plain steps first. Drafters that draft token by token are timed with one
    token too, which tells the cost of the first one from that of the others. All rows decode a
    prompt of two tokens in a state of their own, which is dropped.
    """
    plan, params = session.plan, session.params
    request = SamplingParams(max_new_tokens=INT32_MAX, ignore_eos=True)
    rows = [Row(0, _PROMPT, request)] * session.num_rows
    # What the rows decode does not matter, so that their first token stays unread.
    state = programs.empty(params, *row_arguments(session, rows, session.num_rows))
    ended, everyone = np.zeros(session.num_rows, bool), np.int32(session.num_rows + 1)
    pages = None
    if plan.page_size is not None:  # no row has one
        shape = session.num_rows, plan.capacity // plan.page_size
        pages = np.full(shape, plan.num_pages, np.int32)
    none = np.zeros(len(plan.drafter.parts), np.int32)
    sleeping = Limits(none, np.zeros(len(none), np.float32))

    def timed(limits: Limits, rounds: int) -> StepRecord:
        nonlocal state
        begin = time.perf_counter()
        state, packed = programs.step(
            params, state, limits, ended, np.int32(rounds), everyone, pages
        )
        jax.block_until_ready(packed)
        seconds = time.perf_counter() - begin
        longest, confidence = limits.longest.tolist(), limits.confidence.tolist()
        names = controllers.Limits(tuple(longest), tuple(confidence))
        return step_record(session, names, packed.read(), seconds)

    def measured(limits: Limits) -> StepRecord:
        """Return the faster of two steps, the first of which may find caches and threads cold."""
        both = [timed(limits, rounds) for _ in range(2)]
        return min(both, key=lambda record: record.seconds)

    rounds = 1 if timed(sleeping, 1).seconds > _SLOW_S else _ROUNDS
    for width in plan.widths:
        yield measured(sleeping.replace(least_width=np.int32(width)))
    short = next((width - 1 for width in plan.widths if width > 1), 0)
    for number, part in enumerate(plan.drafter.parts):
        if not part.num_nodes:
            continue
        most = min(short, part.num_nodes)
        for length in sorted({1, most}) if part.stops else [most]:
            longest = np.where(np.arange(len(none)) == number, length, 0).astype(np.int32)
            yield measured(replace(sleeping, longest=longest))
