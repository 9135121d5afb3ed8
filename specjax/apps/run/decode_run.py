"""The runner's preset of `decode`: groups of questions, decoded plainly and by drafters in turn.

With one slot a group is a single question; with more, a group is large enough that most of its rows
enter a slot that another row left.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specjax.apps.command_line.console import Marker, Screen
from specjax.apps.rows.decode_report import PLAIN, Clock, DrafterRun
from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.speedups import median_repeat
from specjax.apps.rows.statistics import engine_summary
from specjax.apps.run.conversations import Conversations, Turn
from specjax.apps.run.decode_config import ConfigDrafter, DecodeConfig, make_config_drafter
from specjax.apps.run.runner import Answers, Program, Way, in_turn, turn_order
from specjax.core.none import PLAIN_DECODING
from specjax.engine.generate import Generation, expected_acceptance
from specjax.engine.outputs import Delta
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import groups

_GROUP = 4
"""The number of questions of a group per slot."""
_REPEATS, _SHORT_S = 3, 30.0
"""How often a single prompt is decoded, and the seconds within which its repeats must end."""
SHOWN_ROWS = 24
"""The maximum number of rows whose texts are shown; of more rows, texts are in the report only."""

_Repeat = dict[Way, Answers]
"""What each way answered in one repeat of a turn of a group."""


@dataclass
class Decoding:
    """The decoding of a config's conversations with each of its drafters; `runs` get the rows."""

    config: DecodeConfig
    conversations: Conversations
    drafters: Sequence[ConfigDrafter]
    runs: Sequence[DrafterRun]
    screen: Screen
    clock: Clock
    plain: Way | None = None
    recorded: dict[int, Generation] = field(default_factory=dict)
    """Results of plain decoding that are there already, by the number of their first request."""
    finished_rows: int = 0
    """The rows finished by plain decoding and all drafters together."""
    _batch: int = 0
    """The number of turns of groups that are finished."""

    @property
    def simulated(self) -> bool:
        """Whether some drafter is made from the output of plain decoding."""
        return any(drafter.replays for drafter in self.config.drafters)

    @property
    def num_rows(self) -> int:
        """The number of rows that each drafter decodes."""
        return self.conversations.rows[-1]

    @property
    def num_repeats(self) -> int:
        """The maximum number of times that each group is decoded."""
        short = self.num_rows == 1 and self.config.compare
        return self.config.repeats or (_REPEATS if short else 1)

    @property
    def shows_texts(self) -> bool:
        """Whether texts are shown on the screen."""
        return self.num_rows <= SHOWN_ROWS

    @property
    def groups(self) -> list[Sequence[int]]:
        """The indices of questions in groups; the turns of each are decoded before the next one."""
        count = len(self.config.questions)
        slots = min(self.config.options.batch_size, count)
        return groups(range(count), slots if slots == 1 else _GROUP * slots)

    def run(self, *, with_expectation: bool = False) -> Iterator[None]:
        """Decode all groups, turn by turn, showing the texts of the first drafter.

        Yields whenever a turn of a group, whose rows are then in `runs`, has been decoded in all
        ways. With `with_expectation` the expected acceptance is computed at the end, which takes as
        long as decoding. Raises InputError for prompts that cannot be decoded, and
        KeyboardInterrupt, if the user interrupts, after the last finished turn.
        """
        ways = self._ways()
        drafted = [way for way in ways if way is not self.plain]
        answered: dict[Way, list[Answers]] = defaultdict(list)
        for group in self.groups:
            texts: dict[int, list[str]] = {index: [] for index in group}
            number = 0
            while (turn := self.conversations.turn(number, texts)) is not None:
                repeats, interrupted = self._decode_turn(turn, ways, alone=len(group) == 1)
                # Comparing takes long: an interruption must not add the rows of some drafters only.
                finished = [self._finish(way, repeats) for way in drafted]
                for way, (answers, rows) in zip(drafted, finished, strict=True):
                    way.run.add(answers.result, rows)
                    way.run.engine = engine_summary(way.program.engine.statistics)
                    answered[way].append(answers)
                self._batch += 1
                if self.shows_texts:
                    run_rows = [rows for _, rows in finished]
                    self._show(drafted[0].plan, finished[0][0], run_rows, alone=len(group) == 1)
                yield
                if interrupted:
                    raise KeyboardInterrupt
                first = finished[0][0] if ways[0] is drafted[0] else repeats[0][ways[0]]
                for index, text in zip(turn.questions, first.result.texts, strict=True):
                    texts[index].append(text)
                number += 1
        for way in drafted:
            if with_expectation and self.config.has_expectation and way.name != PLAIN_DECODING:
                with self.screen.working(
                    f"expected acceptance: the distributions of {way.name}'s run once more"
                ):
                    requests = [one for each in answered[way] for one in each.turn.requests]
                    results = [each.result for each in answered[way]]
                    expected = expected_acceptance(way.plan, requests, results)
                    way.run.expected = expected if expected.num_nodes else None

    def _ways(self) -> list[Way]:
        """Return the ways to decode: the first drafter, plain decoding, and the other drafters.

        Plain decoding is first, and done, if some drafter is made from its output.
        """
        config, options = self.config, self.config.options
        made = [one.loaded for one in self.drafters]
        if config.compare or self.simulated:
            plan = self.conversations.plan(None, options.without_drafts())
            self.plain = Way(PLAIN, Program(plan))
        if self.simulated:
            found: dict[int, list[int]] = {}
            for group in self.groups:
                for _, answers in in_turn(self.conversations, group, [self.plain], self._decode):
                    for one in answers:
                        numbers = [request.number for request in one.turn.requests]
                        self.recorded[numbers[0]] = one.result
                        found |= zip(numbers, one.result.token_ids, strict=True)
            continuations = [found.get(number, []) for number in range(max(found) + 1)]
            for index, drafter in enumerate(config.drafters):
                if drafter.replays:
                    model = self.conversations.model
                    made[index] = make_config_drafter(config, drafter, model, continuations).loaded
        ways = [
            Way(run.drafter, Program(self.conversations.plan(drafter, options)), run)
            for drafter, run in zip(made, self.runs, strict=True)
        ]
        if self.plain is not None:
            ways.insert(0 if self.simulated else 1, self.plain)
        return ways

    def _decode_turn(
        self, turn: Turn, ways: Sequence[Way], *, alone: bool
    ) -> tuple[list[_Repeat], bool]:
        """Decode a turn of a group in all ways, in several repeats if configured.

        `alone` says whether the group is a single question. Returns the complete repeats, and
        whether the user interrupted them. Raises KeyboardInterrupt if none is complete.
        """
        repeats: list[_Repeat] = []
        interrupted = False
        try:
            while not repeats or self._repeats_after(repeats):
                order = turn_order(len(ways), len(repeats))
                repeats.append({})
                shown = alone and self.shows_texts and len(repeats) == 1
                for way in (ways[number] for number in order):
                    result = self._decode(way, turn, repeat=len(repeats), shown=shown)
                    repeats[-1][way] = Answers(turn, result)
        except KeyboardInterrupt:
            interrupted = True
        complete = [repeat for repeat in repeats if len(repeat) == len(ways)]
        if not complete:
            raise KeyboardInterrupt
        return complete, interrupted

    def _repeats_after(self, repeats: Sequence[_Repeat]) -> bool:
        """Return whether to decode a turn once more after these repeats."""
        results = [one.result for repeat in repeats for one in repeat.values()]
        seconds = sum(result.prefill_s + result.decode_s for result in results)
        if len(repeats) >= self.num_repeats or not all(
            r.new_tokens and r.decode_s for r in results
        ):
            return False
        next_end = seconds * (1 + 1 / len(repeats))
        return self.config.repeats is not None or next_end < _SHORT_S

    def _finish(self, way: Way, repeats: Sequence[_Repeat]) -> tuple[Answers, list[DecodedRow]]:
        """Return the answers to report for a turn of a group, as rows too.

        They are from the repeat with the median speed-up, or from the first one whose tokens
        differ.
        """
        ours, questions = [repeat[way] for repeat in repeats], self.config.questions
        if self.plain is None:
            return ours[0], ours[0].rows(way.name, self._batch, questions, None, None)
        plain = [repeat[self.plain].result for repeat in repeats]
        pairs = list(zip(ours, plain, strict=True))
        compared = self.config.compare and self.config.comparable
        differences = [
            one.differences(way.plan, other) if compared else None for one, other in pairs
        ]
        speeds = []
        if len(repeats) > 1:
            speeds = [(o.result.tokens_per_second, p.tokens_per_second) for o, p in pairs]
        different = [number for number, rows in enumerate(differences) if rows and any(rows)]
        number = different[0] if different else median_repeat(speeds) if speeds else 0
        found = (plain[number], differences[number], speeds)
        return ours[number], ours[number].rows(way.name, self._batch, questions, *found)

    def _decode(self, way: Way, turn: Turn, *, repeat: int = 1, shown: bool = False) -> Generation:
        """Decode a turn of a group, showing progress, and if `shown` the first drafter's text.

        `repeat` is the number of the repeat, from 1.
        """
        if way is self.plain and repeat == 1:
            recorded = self.recorded.pop(turn.requests[0].number, None)
            if recorded is not None:
                return recorded
        shown = shown and way.run is self.runs[0]
        way.program.open(way.name, turn.requests, self.screen, self.clock)
        if shown and self.screen.live:
            self._show_question(turn, 0)
        marker = Marker(way.plan.model.tokenizer)
        statistics = way.program.engine.statistics
        decoded, ended = len(self.runs[0].rows), 0
        total = self.num_rows
        ways = len(self.runs) + (self.plain is not None)
        label = way.name + f", repeat {repeat}" * (self.num_repeats > 1)

        def follow(deltas: list[Delta]) -> None:
            nonlocal ended
            if self.clock.first_token_s is None and deltas:
                self.clock.first_token_s = time.perf_counter() - self.clock.begin
            for delta in deltas:
                if shown and self.screen.live:
                    self.screen.text(marker.mark(delta))
                ended += delta.output is not None
            self.screen.progress(
                label,
                decoded + ended,
                total,
                statistics.tokens / statistics.decode_s if statistics.decode_s else 0.0,
                (self.finished_rows + ended) / (total * ways * self.num_repeats),
            )

        result = way.decode(turn, follow)
        self.screen.rest()
        self.finished_rows += len(turn.questions)
        if shown and not self.screen.live:
            self._show_question(turn, 0)
            self.screen.text(_pieces(way.plan, result, 0))
            self.screen.rest()
        return result

    def _show_question(self, turn: Turn, row: int) -> None:
        self.screen.question(turn.questions[row] + 1, self.config.questions, turn.number)

    def _show(
        self,
        plan: DecodePlan,
        first: Answers,
        rows: Sequence[Sequence[DecodedRow]],
        *,
        alone: bool,
    ) -> None:
        """Show the texts of a turn of a group, unless it is `alone`, and the result of each row.

        `first` are the answers of the first drafter, whose plan is `plan`. `_decode` showed the
        text of a group of one question.
        """
        turn = first.turn
        for number in range(len(turn.questions)):
            if not alone:
                self._show_question(turn, number)
                self.screen.text(_pieces(plan, first.result, number))
            for run, run_rows in zip(self.runs, rows, strict=True):
                row = run_rows[number]
                if self.num_rows == len(rows) == 1 and row.finish_reason != "error":
                    self.screen.row_length(row)  # the results say the rest
                    continue
                name = run.drafter if len(rows) > 1 else ""
                self.screen.row_result(row, name, brief=run is not self.runs[0], timed=alone)


def _pieces(plan: DecodePlan, result: Generation, row: int) -> list[tuple[str, int]]:
    """Return a row's text in pieces, each with its drafter's index or -1."""
    tokens, text = result.token_ids[row], result.texts[row]
    whole = Delta(row, 0, tokens, result.drafter_of_tokens(row), text)
    return Marker(plan.model.tokenizer).mark(whole)
