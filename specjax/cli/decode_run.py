"""Runs a decode config, alternating between plain decoding and the drafters.

Rows are decoded in groups, each by one drafter after the other: with one slot a row is a group,
with more of them a group is large enough that most of its rows enter a slot that another row left.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specjax.cli.console import Marker, Screen
from specjax.cli.decode_config import (
    SIMULATED,
    DecodeConfig,
    make_config_drafter,
    turn_prompts,
)
from specjax.decoding.compare_outputs import Difference, compare_row
from specjax.decoding.engine.engine import Engine
from specjax.decoding.engine.outputs import Delta
from specjax.decoding.generate import (
    Generation,
    add_prompts,
    decode_session,
    expected_acceptance,
    open_engine,
)
from specjax.decoding.setup import Session, plan_session
from specjax.drafters import LoadedDrafter
from specjax.loading.model import Model
from specjax.reporting.decode_report import PLAIN, Clock, DrafterRun
from specjax.reporting.engine_report import engine_summary
from specjax.reporting.records import Row

ROUNDS_PER_STEP = 4
"""Rounds between two reads from the device: enough for streaming, and cheap."""
_GROUP = 4
"""Rows of a group, by slot."""
SHOWN_ROWS = 24
"""With more rows than this, texts are only in the report."""


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
    engine: Engine | None = None

    def note_engine(self, turn: int) -> None:
        """Put what the engine has done so far in a turn into the run's report."""
        self.run.engines[turn] = engine_summary(self.engine.statistics)

    @property
    def speed(self) -> float:
        """Tokens/s so far, a group that is under way included."""
        statistics = self.engine.statistics
        return statistics.tokens / statistics.decode_s if statistics.decode_s else 0.0


def decode_batches(
    config: DecodeConfig,
    model: Model,
    drafters: Sequence[LoadedDrafter],
    runs: Sequence[DrafterRun],
    screen: Screen,
    clock: Clock,
) -> Iterator[list[Row]]:
    """Decode a config's prompts with each of its drafters, and show the texts of the first.

    Yields the rows of a group that all drafters have finished; they are in their `runs`. Raises
    InputError, and KeyboardInterrupt after the last group that was finished.
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
        opened = functools.partial(
            plan_session,
            model,
            prompts,
            requests=sampling,
            seed=seed,
            names=[
                config.prompt_name(config.questions[index].question_id, turn)
                for index in config.turn(turn)
            ],
        )
        sessions = [opened(drafter=drafter, options=config.options) for drafter in drafters]
        plain = None
        if with_plain:
            plain = _Side(PLAIN, opened(options=config.options.without_drafts()))
        if simulated:
            for index in _groups(plain.session):
                _decode(plain, index, screen, clock, progress)
            recorded = [ids for result in plain.results for ids in result.token_ids]
            for number, one in enumerate(config.drafters):
                if one.name == SIMULATED:
                    made = make_config_drafter(config, one, model, recorded).loaded
                    sessions[number] = opened(drafter=made, options=config.options)
        drafting = [
            _Side(run.drafter, session, run) for run, session in zip(runs, sessions, strict=True)
        ]
        yield from _turn(config, turn, drafting, plain, screen, clock, progress, answers)
        for side in drafting:
            if config.has_expectation and side.name != "none":
                with screen.working(
                    f"expected acceptance: the distributions of {side.name}'s run once more"
                ):
                    side.run.expected.append(expected_acceptance(side.session, side.results))


def _turn(
    config: DecodeConfig,
    turn: int,
    sides: Sequence[_Side],
    plain: _Side | None,
    screen: Screen,
    clock: Clock,
    progress: Progress,
    answers: dict[int, list[str]],
) -> Iterator[list[Row]]:
    """A turn's groups, each decoded by the first drafter, plainly, and by the other drafters.

    So each is timed in turn, and whatever slows the machine down slows all of them.
    """
    first, *others = sides
    indices = config.turn(turn)
    _prepare(first, screen, clock)
    groups = _groups(first.session)
    for number, index in enumerate(groups):
        questions = [config.questions[indices[prompt]] for prompt in index]
        alone = progress.shown and len(index) == 1
        live = alone and screen.live
        head = functools.partial(_show_question, config, screen, turn)
        if live:
            head(indices[index[0]])
        result = _decode(first, index, screen, clock, progress, live=live)
        results, baseline, interrupted = [result], None, False
        if alone and not live:
            head(indices[index[0]])
            screen.text(_pieces(first.session, result, 0))
            screen.rest()
        try:
            if plain is not None:
                # Where a drafter needs plain decoding's output, that has run before.
                if len(plain.results) == number:
                    _decode(plain, index, screen, clock, progress)
                baseline = plain.results[number]
            for side in others:
                results.append(_decode(side, index, screen, clock, progress))
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
        rows = [
            side.run.add(progress.batches, turn, questions, one, baseline, found)
            for side, one, found in zip(sides, results, differences, strict=True)
        ]
        for number_in_group, prompt in enumerate(index if progress.shown else []):
            if not alone:
                head(indices[prompt])
                screen.text(_pieces(first.session, result, number_in_group))
            for side, of_side in zip(sides, rows, strict=True):
                name = side.name if others else ""
                screen.row_result(
                    of_side[number_in_group], name, brief=side is not first, timed=len(index) == 1
                )
        for side in sides:
            side.note_engine(turn)
        progress.batches += 1
        yield [row for of_side in rows for row in of_side]
        if interrupted:
            raise KeyboardInterrupt


def _compare(
    config: DecodeConfig,
    side: _Side,
    index: Sequence[int],
    result: Generation,
    baseline: Generation | None,
) -> list[Difference | None] | None:
    """Where a group's rows differ from plain decoding's; None where that is not asked."""
    if not config.compare or not config.comparable or baseline is None:
        return None
    return [
        compare_row(side.session, prompt, result.token_ids[row], baseline.token_ids[row])
        for row, prompt in enumerate(index)
    ]


def _show_question(config: DecodeConfig, screen: Screen, turn: int, number: int) -> None:
    screen.question(number + 1, len(config.questions), config.questions[number], turn)


def _groups(session: Session) -> list[list[int]]:
    """The prompts that are decoded before the next drafter's turn."""
    slots = session.batch_size
    return session.groups(slots if slots == 1 else _GROUP * slots)


def _prepare(side: _Side, screen: Screen, clock: Clock) -> None:
    """Compile a session and run its first round once, so that timings exclude the warm-up."""
    session, begin = side.session, time.perf_counter()
    side.engine = open_engine(session, ROUNDS_PER_STEP)
    with screen.working(f"compiling {'plain decoding' if side.name == PLAIN else side.name}"):
        side.engine.compile()
    clock.compiled(side.name, time.perf_counter() - begin)
    # What the first round takes says nothing of later ones.
    with open_engine(session, 1) as warm:
        add_prompts(warm, session, range(min(session.batch_size, len(session.prompts))))
        warm.step()


def _decode(
    side: _Side,
    index: list[int],
    screen: Screen,
    clock: Clock,
    progress: Progress,
    *,
    live: bool = False,
) -> Generation:
    if side.engine is None:
        _prepare(side, screen, clock)
    marker = Marker(side.session.model.tokenizer)
    decoded = sum(len(result.token_ids) for result in side.results)
    ended = 0

    def follow(deltas: list[Delta]) -> None:
        nonlocal ended
        if clock.first_token_s is None and deltas:
            clock.first_token_s = time.perf_counter() - clock.begin
        for delta in deltas:
            if live:
                screen.text(marker.mark(delta))
            ended += delta.output is not None
        screen.progress(
            side.name,
            decoded + ended,
            len(side.session.prompts),
            side.speed,
            (progress.done + ended) / progress.total,
        )

    result = decode_session(side.session, index=index, engine=side.engine, follow=follow)
    screen.rest()
    progress.done += len(index)
    side.results.append(result)
    return result


def _pieces(session: Session, result: Generation, row: int) -> list[tuple[str, bool]]:
    """A row's text in pieces, each with whether it was drafted."""
    tokens, text = result.token_ids[row], result.texts[row]
    whole = Delta(row, 0, tokens, result.was_drafted(row), text)
    return Marker(session.model.tokenizer).mark(whole)
