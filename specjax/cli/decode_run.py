"""Runs a decode config batch by batch, alternating between plain decoding and the drafters."""

from __future__ import annotations

import copy
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
from specjax.decoding.compare_outputs import Difference, compare_row
from specjax.decoding.executor import (
    compile_session,
    expected_acceptance,
    learn_costs,
    run_batch,
)
from specjax.decoding.generate import Follower, Generation, collect
from specjax.decoding.learned_costs import LearnedCosts
from specjax.decoding.plan import Programs, Session, plan_session
from specjax.decoding.snapshot import Snapshot
from specjax.decoding.state import RUNNING
from specjax.draft_length.policy import Costs
from specjax.drafters import LoadedDrafter
from specjax.loading.model import Model
from specjax.reporting.auto_lengths import AutoCosts, AutoLengths, PartCosts
from specjax.reporting.decode_report import PLAIN, Batch, Clock, DrafterRun

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
    """One drafter's session, or plain decoding's, and its results; compiled when first used."""

    name: str
    session: Session
    run: DrafterRun | None = None
    results: list[Generation] = field(default_factory=list)
    programs: Programs | None = None
    learned: LearnedCosts | None = None
    noted_s: float = 0.0
    """Seconds of measuring that the run's report has of it."""

    def note_costs(self) -> None:
        """Put what is known of costs now into the run's report."""
        learned = self.learned
        if learned is None:
            return
        before = self.run.auto or AutoLengths()
        start = end = None
        if learned.estimate is not None:
            start, end = self._costs(learned.first_costs()), self._costs(learned.costs())
        measure_s = before.measure_s + learned.measure_s - self.noted_s
        self.run.auto = AutoLengths(measure_s, before.start or start, end)
        self.noted_s = learned.measure_s

    def _costs(self, costs: Costs) -> AutoCosts:
        plan = self.session.plan
        seconds = zip(plan.drafter.parts, costs.first.tolist(), costs.further.tolist(), strict=True)
        return AutoCosts(
            dict(zip(plan.widths, costs.passes.tolist(), strict=True)),
            tuple(
                PartCosts(
                    part.name,
                    part.num_speculative_tokens,
                    first,
                    further,
                    part.num_nodes if part.branches else None,
                )
                for part, first, further in seconds
            ),
        )

    def speed(self, snapshot: Snapshot) -> float:
        """Tokens/s so far, a batch that is under way included."""
        tokens = sum(result.new_tokens for result in self.results) + sum(_new(self, snapshot))
        seconds = sum(result.total_decode_s for result in self.results) + snapshot.decode_s
        return tokens / seconds if seconds else 0.0


def decode_batches(
    config: DecodeConfig,
    model: Model,
    drafters: Sequence[LoadedDrafter],
    runs: Sequence[DrafterRun],
    screen: Screen,
    clock: Clock,
) -> Iterator[None]:
    """Decode a config's prompts with each of its drafters, and show the texts of the first.

    Yields whenever all drafters have finished a batch and it was added to their `runs`. Raises
    InputError, and KeyboardInterrupt after the last batch that was finished.
    """
    simulated = any(one.name == SIMULATED for one in config.drafters)
    with_plain = config.compare or simulated
    rows = sum(len(config.turn(turn)) for turn in range(config.num_turns))
    sides = len(drafters) + with_plain
    progress = Progress(rows * sides, shown=rows <= SHOWN_ROWS)
    answers: dict[int, list[str]] = defaultdict(list)
    for turn in range(config.num_turns):
        seed, sampling = config.turn_seeds(turn)
        prompts = turn_prompts(config, model, turn, answers)
        opened = functools.partial(plan_session, model, prompts, requests=sampling, seed=seed)
        sessions = [opened(drafter=drafter, options=config.options) for drafter in drafters]
        plain = None
        if with_plain:
            plain = _Side(PLAIN, opened(options=config.options.without_drafts()))
        if simulated:
            for index in plain.session.batches():
                _decode(plain, index, screen, clock, progress)
            recorded = [ids for result in plain.results for ids in result.token_ids]
            for number, one in enumerate(config.drafters):
                if one.name == SIMULATED:
                    made = make_config_drafter(config, one, model, recorded).loaded
                    sessions[number] = opened(drafter=made, options=config.options)
        drafting = [
            _Side(run.drafter, session, run) for run, session in zip(runs, sessions, strict=True)
        ]
        try:
            yield from _turn(config, turn, drafting, plain, screen, clock, progress, answers)
        finally:
            for side in drafting:
                if side.learned is not None:
                    side.learned.save()
        for side in drafting:
            if config.has_expectation and side.name != "none":
                with screen.working(
                    f"expected acceptance: the distributions of {side.name}'s run once more"
                ):
                    side.run.expected.append(expected_acceptance(side.session))


def _turn(
    config: DecodeConfig,
    turn: int,
    sides: Sequence[_Side],
    plain: _Side | None,
    screen: Screen,
    clock: Clock,
    progress: Progress,
    answers: dict[int, list[str]],
) -> Iterator[None]:
    """A turn's batches, each decoded by the first drafter, plainly, and by the other drafters.

    So each is timed in turn, and whatever slows the machine down slows all of them.
    """
    first, *others = sides
    indices = config.turn(turn)
    _prepare(first, screen, clock)
    for index in first.session.batches():
        questions = [config.questions[indices[prompt]] for prompt in index]
        alone = progress.shown and len(index) == 1
        live = alone and screen.live
        head = functools.partial(_show_question, config, screen, turn)
        if live:
            head(indices[index[0]])
        result, last = _decode(first, index, screen, clock, progress, live=live)
        results, baseline, interrupted = [result], None, False
        if alone and not live:
            head(indices[index[0]])
            screen.text(_pieces(first.session, index[0], last, 0))
            screen.rest()
        try:
            baseline = _finished(plain, index) if plain else None
            if plain is not None and baseline is None:
                baseline, _ = _decode(plain, index, screen, clock, progress)
            for side in others:
                results.append(_decode(side, index, screen, clock, progress)[0])
        except KeyboardInterrupt:
            if len(results) < len(sides):
                raise
            interrupted = True
        for row, prompt in enumerate(index):
            answers[indices[prompt]].append(result.texts[row])
        differences = [
            _compare(config, side, index, one, baseline)
            for side, one in zip(sides, results, strict=True)
        ]
        for row, prompt in enumerate(index if progress.shown else []):
            if not alone:
                head(indices[prompt])
                screen.text(_pieces(first.session, prompt, last, row))
            for side, one, found in zip(sides, results, differences, strict=True):
                same = ""
                if found is not None:
                    same = "same tokens" if found[row] is None else "DIFFERENT TOKENS"
                name = side.name if others else ""
                screen.row_result(one, row, baseline, same, name, brief=side is not first)
        for side, one, found in zip(sides, results, differences, strict=True):
            side.run.batches.append(Batch(progress.batches, turn, questions, one, baseline, found))
            side.note_costs()
        progress.batches += 1
        yield
        if interrupted:
            raise KeyboardInterrupt


def _compare(
    config: DecodeConfig,
    side: _Side,
    index: Sequence[int],
    result: Generation,
    baseline: Generation | None,
) -> list[Difference | None] | None:
    """Where a batch's rows differ from plain decoding's; None where that is not asked."""
    if not config.compare or not config.comparable or baseline is None:
        return None
    return [
        compare_row(side.session, prompt, result.token_ids[row], baseline.token_ids[row])
        for row, prompt in enumerate(index)
    ]


def _show_question(config: DecodeConfig, screen: Screen, turn: int, number: int) -> None:
    screen.question(number + 1, len(config.questions), config.questions[number], turn)


def _prepare(side: _Side, screen: Screen, clock: Clock) -> None:
    """Compile a session and run its first round once, so that timings exclude the warm-up."""
    session, begin = side.session, time.perf_counter()
    with screen.working(f"compiling {'plain decoding' if side.name == PLAIN else side.name}"):
        side.programs = compile_session(session)
    clock.compiled(side.name, time.perf_counter() - begin)
    side.learned = learn_costs(session)
    # What the first round takes says nothing of later ones.
    learned = copy.deepcopy(side.learned)
    next(run_batch(session, side.programs, session.batches()[0], 1, learned))


def _decode(
    side: _Side,
    index: list[int],
    screen: Screen,
    clock: Clock,
    progress: Progress,
    *,
    live: bool = False,
) -> tuple[Generation, Snapshot]:
    if side.programs is None:
        _prepare(side, screen, clock)
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
