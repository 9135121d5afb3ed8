"""Run a decode config, alternating between plain decoding and the drafters.

Rows are decoded in groups, each by one drafter after another. With one slot a group is a single
row; with more, a group is large enough that most of its rows enter a slot that another row left.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from specjax.apps.command_line.console import Marker, Screen
from specjax.apps.rows.compare_outputs import Difference, compare_row
from specjax.apps.rows.decode_report import PLAIN, Clock, DrafterRun
from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.statistics import engine_summary
from specjax.apps.run.decode_config import (
    DecodeConfig,
    make_config_drafter,
)
from specjax.apps.run.ways import Way, median_repeat, turn_order
from specjax.core.none import PLAIN_DECODING
from specjax.drafters import LoadedDrafter
from specjax.engine.generate import Generation, decode_requests, expected_acceptance
from specjax.engine.outputs import Delta
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.requests import Request, groups
from specjax.loading.model import Model

_GROUP = 4
"""The number of rows of a group per slot."""
_REPEATS, _SHORT_S = 3, 30.0
"""How often a single prompt is decoded, and the seconds within which its repeats must end."""
SHOWN_ROWS = 24
"""The maximum number of rows whose texts are shown; of more rows, texts are in the report only."""


@dataclass
class _Side(Way):
    """One drafter, or plain decoding, with the requests of a turn and its results."""

    requests: Sequence[Request] = ()
    run: DrafterRun | None = None
    results: list[Generation] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """The tokens/s so far, including a group in progress."""
        statistics = self.engine.statistics
        return statistics.tokens / statistics.decode_s if statistics.decode_s else 0.0


def decode_batches(
    config: DecodeConfig,
    model: Model,
    drafters: Sequence[LoadedDrafter],
    runs: Sequence[DrafterRun],
    screen: Screen,
    clock: Clock,
    *,
    with_expectation: bool = False,
) -> Iterator[None]:
    """Decode a config's prompts with each of its drafters, showing the texts of the first.

    Yields whenever all drafters have finished a group, whose rows are then in `runs`, which has one
    entry per drafter. Progress and texts are shown on `screen`, and `clock` gets the times of
    compiling and of the first token. With `with_expectation` the expected acceptance is computed
    too, which takes as long as decoding. Raises InputError for prompts that cannot be decoded, and
    KeyboardInterrupt, if the user interrupts, after the last finished group.
    """
    decoding = _Decoding(config, model, screen, clock)
    for turn in range(config.num_turns):
        sides, plain = decoding.open_sides(turn, drafters, runs)
        yield from decoding.decode_turn(turn, sides, plain)
        for side in sides:
            if with_expectation and config.has_expectation and side.name != PLAIN_DECODING:
                with screen.working(
                    f"expected acceptance: the distributions of {side.name}'s run once more"
                ):
                    expected = expected_acceptance(side.plan, side.requests, side.results)
                    side.run.expected.append(expected)


_Repeat = dict[str, Generation]
"""The results of one repeat of a group, by drafter name or `PLAIN`."""


@dataclass
class _Decoding:
    """The state of decoding a config's prompts; `answers` are the texts of the first drafter."""

    config: DecodeConfig
    model: Model
    screen: Screen
    clock: Clock
    finished_rows: int = 0
    """The rows finished by plain decoding and all drafters together."""
    finished_groups: int = 0
    answers: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def simulated(self) -> bool:
        """Whether some drafter is made from the output of plain decoding."""
        return any(drafter.replays for drafter in self.config.drafters)

    @property
    def with_plain(self) -> bool:
        """Whether prompts are also decoded plainly."""
        return self.config.compare or self.simulated

    @property
    def num_rows(self) -> int:
        """The number of rows that each drafter decodes."""
        return sum(len(self.config.turn(turn)) for turn in range(self.config.num_turns))

    @property
    def num_repeats(self) -> int:
        """The maximum number of times that each group is decoded."""
        short = self.num_rows == 1 and self.config.compare
        return self.config.repeats or (_REPEATS if short else 1)

    @property
    def shows_texts(self) -> bool:
        """Whether texts are shown on the screen."""
        return self.num_rows <= SHOWN_ROWS

    def open_sides(
        self, turn: int, drafters: Sequence[LoadedDrafter], runs: Sequence[DrafterRun]
    ) -> tuple[list[_Side], _Side | None]:
        """Return the sides of a turn: one for each drafter, and that of plain decoding or None."""
        config = self.config
        seed, sampling = config.turn_seeds(turn)
        plan = functools.partial(
            plan_requests,
            self.model,
            config.turn_prompts(self.model, turn, self.answers),
            sampling=sampling,
            names=[
                config.prompt_name(config.questions[index].question_id, turn)
                for index in config.turn(turn)
            ],
        )
        options = replace(config.options, seed=seed)
        sides = [
            _side(run.drafter, plan(drafter=drafter, options=options), run)
            for drafter, run in zip(drafters, runs, strict=True)
        ]
        if not self.with_plain:
            return sides, None
        plain = _side(PLAIN, plan(options=options.without_drafts()))
        if self.simulated:
            for index in _groups(plain):
                plain.results.append(self.decode(plain, index))
            recorded = [ids for result in plain.results for ids in result.token_ids]
            for side, drafter in zip(sides, config.drafters, strict=True):
                if drafter.replays:
                    made = make_config_drafter(config, drafter, self.model, recorded).loaded
                    side.plan, side.requests = plan(drafter=made, options=options)
        return sides, plain

    def decode_turn(self, turn: int, sides: Sequence[_Side], plain: _Side | None) -> Iterator[None]:
        """Decode a turn's groups, each by the first drafter, plainly, and by the other drafters.

        Drafters alternate, so that a slow phase of the machine affects all of them.
        """
        sides[0].open(sides[0].requests, self.screen, self.clock)
        for number, index in enumerate(_groups(sides[0])):
            # If a drafter needs the output of plain decoding, that has already run.
            recorded = plain.results[number] if plain is not None and plain.results else None
            repeats, interrupted = self.decode_group(turn, index, sides, plain, recorded)
            questions = [self.config.questions[number] for number in self.asked(turn, index)]
            chosen = [self.choose(side, index, repeats) for side in sides]
            rows = []
            # An interruption within this loop would record the group for some drafters only.
            for side, (result, baseline, differences) in zip(sides, chosen, strict=True):
                side.results.append(result)
                speeds = _speeds(side, repeats)
                group = self.finished_groups
                rows.append(
                    side.run.add(group, turn, questions, result, baseline, differences, speeds)
                )
                side.run.engines[turn] = engine_summary(side.engine.statistics)
            first = chosen[0][0]
            for question, text in zip(self.asked(turn, index), first.texts, strict=True):
                self.answers[question].append(text)
            if self.shows_texts:
                self.show(turn, sides, index, first, rows)
            self.finished_groups += 1
            yield
            if interrupted:
                raise KeyboardInterrupt

    def decode_group(
        self,
        turn: int,
        index: list[int],
        sides: Sequence[_Side],
        plain: _Side | None,
        recorded: Generation | None,
    ) -> tuple[list[_Repeat], bool]:
        """Decode a group with all of `sides` and plainly, in several repeats if configured.

        `recorded` is the result of plain decoding if it has run already. Returns the complete
        repeats, and whether the user interrupted them. Raises KeyboardInterrupt if none is
        complete.
        """
        ways = [sides[0], *([] if plain is None else [plain]), *sides[1:]]
        repeats: list[_Repeat] = []
        interrupted = False
        try:
            while not repeats or self.repeats_after(repeats):
                first, order = not repeats, turn_order(len(ways), len(repeats))
                repeats.append({})
                for way in (ways[number] for number in order):
                    if first and way is sides[0]:
                        result = self.decode_first(turn, way, index)
                    elif first and way is plain and recorded is not None:
                        result = recorded
                    else:
                        result = self.decode(way, index, repeat=len(repeats))
                    repeats[-1][way.name] = result
        except KeyboardInterrupt:
            interrupted = True
        complete = [repeat for repeat in repeats if len(repeat) == len(ways)]
        if not complete:
            raise KeyboardInterrupt
        return complete, interrupted

    def repeats_after(self, repeats: Sequence[_Repeat]) -> bool:
        """Return whether to decode a group once more after these repeats."""
        results = [result for repeat in repeats for result in repeat.values()]
        seconds = sum(result.prefill_s + result.decode_s for result in results)
        if len(repeats) >= self.num_repeats or not all(
            r.new_tokens and r.decode_s for r in results
        ):
            return False
        next_end = seconds * (1 + 1 / len(repeats))
        return self.config.repeats is not None or next_end < _SHORT_S

    def choose(
        self, side: _Side, index: Sequence[int], repeats: Sequence[_Repeat]
    ) -> tuple[Generation, Generation | None, list[Difference | None] | None]:
        """Return the result to report for a group, plain decoding's, and the differences of rows.

        They are from the repeat with the median speed-up, or from the first one whose tokens
        differ.
        """
        differences = [
            self.compare(side, index, repeat[side.name], repeat.get(PLAIN)) for repeat in repeats
        ]
        different = [number for number, rows in enumerate(differences) if rows and any(rows)]
        if different:
            number = different[0]
        elif len(repeats) == 1:
            number = 0
        else:
            number = median_repeat([(repeat[PLAIN], repeat[side.name]) for repeat in repeats])
        return repeats[number][side.name], repeats[number].get(PLAIN), differences[number]

    def asked(self, turn: int, index: Sequence[int]) -> list[int]:
        """Return the indices, in the config, of the questions of a group of prompts."""
        return [self.config.turn(turn)[prompt] for prompt in index]

    def decode_first(self, turn: int, side: _Side, index: list[int]) -> Generation:
        """Decode a group with the first drafter, showing the text if the group is a single row."""
        (question, *others) = self.asked(turn, index)
        if others or not self.shows_texts:
            return self.decode(side, index)
        if self.screen.live:
            self.screen.question(question + 1, self.config.questions, turn)
            return self.decode(side, index, live=True)
        result = self.decode(side, index)
        self.screen.question(question + 1, self.config.questions, turn)
        self.screen.text(_pieces(side.plan, result, 0))
        self.screen.rest()
        return result

    def show(
        self,
        turn: int,
        sides: Sequence[_Side],
        index: Sequence[int],
        first: Generation,
        rows: Sequence[Sequence[DecodedRow]],
    ) -> None:
        """Show the texts of a group, unless `decode_first` did, and the result of each row."""
        for number, question in enumerate(self.asked(turn, index)):
            if len(index) > 1:
                self.screen.question(question + 1, self.config.questions, turn)
                self.screen.text(_pieces(sides[0].plan, first, number))
            for side, side_rows in zip(sides, rows, strict=True):
                name = side.name if len(sides) > 1 else ""
                brief = side is not sides[0]
                if self.num_rows == len(sides) == 1 and side_rows[number].finish_reason != "error":
                    self.screen.row_length(side_rows[number])  # the results say the rest
                    continue
                self.screen.row_result(side_rows[number], name, brief=brief, timed=len(index) == 1)

    def compare(
        self, side: _Side, index: Sequence[int], result: Generation, baseline: Generation | None
    ) -> list[Difference | None] | None:
        """Return the differences of a group's rows from plain decoding, or None if not compared."""
        if not self.config.compare or not self.config.comparable or baseline is None:
            return None
        return [
            compare_row(side.plan, side.requests[prompt], ours, plain)
            for prompt, ours, plain in zip(index, result.token_ids, baseline.token_ids, strict=True)
        ]

    def decode(
        self, side: _Side, index: list[int], *, live: bool = False, repeat: int = 1
    ) -> Generation:
        """Decode a group of prompts, showing the text while it is decoded if `live`.

        `repeat` (from 1) is the number of the repeat, for the lines of progress.
        """
        side.open(side.requests, self.screen, self.clock)
        marker = Marker(side.plan.model.tokenizer)
        decoded, ended = sum(len(result.token_ids) for result in side.results), 0
        ways = len(self.config.drafters) + self.with_plain
        total = self.num_rows * ways * self.num_repeats
        label = side.name + f", repeat {repeat}" * (self.num_repeats > 1)

        def follow(deltas: list[Delta]) -> None:
            nonlocal ended
            if self.clock.first_token_s is None and deltas:
                self.clock.first_token_s = time.perf_counter() - self.clock.begin
            for delta in deltas:
                if live:
                    self.screen.text(marker.mark(delta))
                ended += delta.output is not None
            self.screen.progress(
                label,
                decoded + ended,
                len(side.requests),
                side.speed,
                (self.finished_rows + ended) / total,
            )

        requests = [side.requests[prompt] for prompt in index]
        result = decode_requests(side.plan, requests, engine=side.engine, follow=follow)
        self.screen.rest()
        self.finished_rows += len(index)
        return result


def _side(
    name: str, planned: tuple[DecodePlan, Sequence[Request]], run: DrafterRun | None = None
) -> _Side:
    plan, requests = planned
    return _Side(name, plan, requests=requests, run=run)


def _groups(side: _Side) -> list[list[int]]:
    """Return the indices of prompts in groups; all drafters decode a group before the next one."""
    slots = side.plan.options.batch_size
    return groups(list(range(len(side.requests))), slots if slots == 1 else _GROUP * slots)


def _speeds(side: _Side, repeats: Sequence[_Repeat]) -> list[tuple[float, float]]:
    """Return a side's tokens/s and plain decoding's in each repeat; empty for a single repeat."""
    if len(repeats) == 1:
        return []
    results = [(repeat[side.name], repeat[PLAIN]) for repeat in repeats]
    return [tuple(run.new_tokens / run.decode_s for run in pair) for pair in results]


def _pieces(plan: DecodePlan, result: Generation, row: int) -> list[tuple[str, int]]:
    """Return a row's text in pieces, each with its drafter's index or -1."""
    tokens, text = result.token_ids[row], result.texts[row]
    whole = Delta(row, 0, tokens, result.drafter_of_tokens(row), text)
    return Marker(plan.model.tokenizer).mark(whole)
