"""Runs a decode config batch by batch, alternating between plain decoding and the drafter."""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.cli.console import Marker, Screen
from specjax.cli.decode_config import (
    SIMULATED,
    DecodeConfig,
    make_config_drafter,
    turn_prompts,
)
from specjax.decoding.compare_outputs import compare_row
from specjax.decoding.executor import (
    compile_session,
    expected_acceptance,
    learn_costs,
    run_batch,
)
from specjax.decoding.generate import Follower, Generation, collect
from specjax.decoding.learned import Learned
from specjax.decoding.plan import Programs, Session, plan_session
from specjax.decoding.snapshot import Snapshot
from specjax.decoding.state import RUNNING
from specjax.drafters import LoadedDrafter
from specjax.loading.model import Model
from specjax.metrics import ExpectedAcceptance
from specjax.reporting.decode_report import Batch, Clock

ROUNDS_PER_STEP = 4
"""Rounds between two reads from the device: enough for streaming, and cheap."""
SHOWN_ROWS = 24
"""With more rows than this, texts are only in the report."""

_IMPORTED = time.time()


@dataclass
class Progress:
    """How many rows, plain ones included, the run has to decode and has decoded."""

    total: int
    shown: bool
    """Whether texts are shown as well."""
    done: int = 0
    batches: int = 0


@dataclass
class _Side:
    """A compiled and warmed-up session, and its decoding speed."""

    name: str
    session: Session
    programs: Programs
    learned: Learned | None
    results: list[Generation] = field(default_factory=list)

    def speed(self, snapshot: Snapshot) -> float:
        """Tokens/s so far, a batch that is under way included."""
        tokens = sum(result.new_tokens for result in self.results) + sum(_new(self, snapshot))
        seconds = sum(result.total_decode_s for result in self.results) + snapshot.decode_s
        return tokens / seconds if seconds else 0.0


def decode_batches(
    config: DecodeConfig,
    model: Model,
    drafter: LoadedDrafter,
    screen: Screen,
    clock: Clock,
    expected: list[ExpectedAcceptance],
) -> Iterator[Batch]:
    """Decode a config's prompts and show the texts; yields each batch once it is finished.

    Each turn's expected acceptance is appended to `expected`, where the config asks for it. Raises
    InputError, and KeyboardInterrupt after the last batch that was finished.
    """
    with_plain = config.compare or config.drafter == SIMULATED
    rows = sum(len(config.turn(turn)) for turn in range(config.num_turns))
    progress = Progress(rows * (2 if with_plain else 1), shown=rows <= SHOWN_ROWS)
    answers: dict[int, list[str]] = defaultdict(list)
    for turn in range(config.num_turns):
        seed, sampling = config.turn_seeds(turn)
        opened = functools.partial(
            plan_session,
            model,
            turn_prompts(config, model, turn, answers),
            requests=sampling,
            seed=seed,
        )
        session = opened(drafter=drafter, options=config.options)
        plain = None
        if with_plain:
            alone = config.options.without_drafts()
            plain = _prepare("plain", opened(options=alone), screen, clock)
        if config.drafter == SIMULATED:
            for index in plain.session.batches():
                _decode(plain, index, screen, clock, progress)
            recorded = [ids for result in plain.results for ids in result.token_ids]
            session = opened(
                drafter=make_config_drafter(config, model, recorded), options=config.options
            )
        ours = _prepare(config.drafter, session, screen, clock)
        yield from _turn(config, turn, ours, plain, screen, clock, progress, answers)
        if config.has_expectation:
            with screen.working("expected acceptance: the distributions of the same run once more"):
                expected.append(expected_acceptance(session))


def _turn(
    config: DecodeConfig,
    turn: int,
    ours: _Side,
    plain: _Side | None,
    screen: Screen,
    clock: Clock,
    progress: Progress,
    answers: dict[int, list[str]],
) -> Iterator[Batch]:
    indices = config.turn(turn)
    for index in ours.session.batches():
        questions = [config.questions[indices[prompt]] for prompt in index]
        live = progress.shown and screen.live and len(index) == 1
        if live:
            screen.question(indices[index[0]] + 1, len(config.questions), questions[0], turn)
        result, last = _decode(ours, index, screen, clock, progress, live=live)
        for row, prompt in enumerate(index):
            answers[indices[prompt]].append(result.texts[row])
        baseline = _finished(plain, index) if plain else None
        interrupted = False
        if plain is not None and baseline is None:
            try:
                baseline, _ = _decode(plain, index, screen, clock, progress)
            except KeyboardInterrupt:
                interrupted = True
        differences = None
        if config.compare and config.comparable and baseline is not None:
            differences = [
                compare_row(ours.session, prompt, result.token_ids[row], baseline.token_ids[row])
                for row, prompt in enumerate(index)
            ]
        for row, prompt in enumerate(index if progress.shown else []):
            if not live:
                number = indices[prompt] + 1
                screen.question(number, len(config.questions), questions[row], turn)
                screen.text(_pieces(ours.session, prompt, last, row))
            same = ""
            if differences is not None:
                same = "same tokens" if differences[row] is None else "DIFFERENT TOKENS"
            screen.row_result(result, row, baseline, same)
        yield Batch(progress.batches, turn, questions, result, baseline, differences)
        progress.batches += 1
        if interrupted:
            raise KeyboardInterrupt


def _prepare(name: str, session: Session, screen: Screen, clock: Clock) -> _Side:
    """Compile a session and run its first round once, so that timings exclude the warm-up."""
    begin = time.perf_counter()
    with screen.working(f"compiling {'plain decoding' if name == 'plain' else name}"):
        programs = compile_session(session)
    clock.compile_s += time.perf_counter() - begin
    learned = None
    if session.plan.draft_length.auto:
        with screen.working("measuring rounds of each width"):
            learned = learn_costs(session, programs)
    next(run_batch(session, programs, session.batches()[0], 1, learned))
    return _Side(name, session, programs, learned)


def _decode(
    side: _Side,
    index: list[int],
    screen: Screen,
    clock: Clock,
    progress: Progress,
    *,
    live: bool = False,
) -> tuple[Generation, Snapshot]:
    follower = Follower(side.session, index[0])
    marker = Marker(side.session.model.tokenizer)
    before = progress.done
    for snapshot in run_batch(side.session, side.programs, index, ROUNDS_PER_STEP, side.learned):
        if clock.first_token_s is None:
            clock.first_token_s = process_age()
        if live and (delta := follower.follow(snapshot, snapshot.kept_rounds(), 0)) is not None:
            screen.text(marker.mark(delta))
        ended = int((snapshot.status != RUNNING).sum())
        limits = [side.session.requests[prompt].max_new_tokens for prompt in index]
        share = sum(new / most for new, most in zip(_new(side, snapshot), limits, strict=True))
        share = max(share, ended)
        screen.progress(
            side.name,
            sum(len(result.token_ids) for result in side.results) + ended,
            len(side.session.prompts),
            side.speed(snapshot),
            min((before + share) / progress.total, 1.0),
        )
    screen.rest()
    progress.done += len(index)
    result = collect(side.session, [snapshot])
    side.results.append(result)
    return result, snapshot


def _finished(plain: _Side, index: Sequence[int]) -> Generation | None:
    """Plain decoding's result for a batch, if it was run before."""
    number = plain.session.batches().index(list(index))
    return plain.results[number] if number < len(plain.results) else None


def _pieces(session: Session, prompt: int, snapshot: Snapshot, row: int) -> list[tuple[str, bool]]:
    delta = Follower(session, prompt).follow(snapshot, snapshot.kept_rounds(), row)
    return [] if delta is None else Marker(session.model.tokenizer).mark(delta)


def _new(side: _Side, snapshot: Snapshot) -> list[int]:
    """New tokens of each row of a snapshot."""
    lengths: Any = snapshot.lengths
    return [
        int(lengths[row]) - len(side.session.prompts[prompt])
        for row, prompt in enumerate(snapshot.index)
    ]


def process_age() -> float:
    """Seconds since this process began, or since this module was imported where that is unknown."""
    try:
        # Field 22, in clock ticks since the machine started; the name before it may hold spaces.
        begin = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        uptime = Path("/proc/uptime").read_text().split()[0]
        return float(uptime) - int(begin) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time() - _IMPORTED
