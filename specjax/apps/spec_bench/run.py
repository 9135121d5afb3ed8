"""The runner's preset of `spec_bench`: question by question, saving finished answers.

Plain decoding comes first on each question; its answers are the history of later turns, for all
drafters alike. The drafters follow, in an order that varies by question. A unit of work is a
question with one cell: its rows are appended to the cell's file together, and a resumed run skips
the unit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jax.sharding import Mesh

from specjax.apps.command_line.console import Screen
from specjax.apps.rows.decode_report import Clock, summary
from specjax.apps.rows.records import all_exact
from specjax.apps.rows.report_file import ReportFile
from specjax.apps.run.conversations import Conversations, Turn
from specjax.apps.run.decode_config import has_chat_template, load_target
from specjax.apps.run.runner import (
    Answers,
    Way,
    check_answered,
    in_turn,
    open_run,
    turn_order,
)
from specjax.apps.spec_bench.answers_file import finished_rows
from specjax.apps.spec_bench.config import Cell, SpecBenchConfig
from specjax.apps.spec_bench.programs import Programs
from specjax.apps.tuning.weight_bandwidth import memory_bandwidth
from specjax.engine.generate import Generation
from specjax.engine.plan import longest_row
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.sampling import derived_seed


@dataclass(eq=False, kw_only=True)
class _Way(Way):
    """A cell while it is measured: its program, its answers so far, and its file."""

    cell: Cell
    path: Path
    file: ReportFile
    clock: Clock = field(default_factory=Clock)

    @functools.cached_property
    def answered(self) -> set[int | str]:
        """The ids of the finished questions."""
        return {row.question_id for row in self.run.rows}


class Measuring:
    """The measurement of the cells of a config; `paths` are the files with their answers."""

    def __init__(
        self, config: SpecBenchConfig, folder: Path, mesh: Mesh | None, screen: Screen
    ) -> None:
        """Load the target and its drafters, and read finished answers. Raises InputError."""
        self._config, self._screen = config, screen
        turns = {question.question_id: len(question.turns) for question in config.chosen}
        paths = [folder / cell.file_name for cell in config.cells]
        rows = [finished_rows(path, turns, screen.say) for path in paths]
        with screen.working(f"loading {config.target}"):
            self.model = load_target(config, mesh)
            self._conversations = _conversations(config, self.model)
            self._programs = Programs(config, self._conversations, screen)
            self._ways = []
            for cell, path, done in zip(config.cells, paths, rows, strict=True):
                (drafter,), made = cell.config.drafters, self._programs.drafter(cell)
                limit = cell.length if isinstance(cell.length, int) else None
                self._ways.append(
                    _Way(
                        cell.entry if limit is None else f"{cell.entry}, {limit}",
                        self._programs.program(cell),
                        open_run(cell.config, drafter, made, self.model, mesh, done),
                        limit,
                        cell=cell,
                        path=path,
                        file=ReportFile(path, screen.say, resumed=bool(done)),
                    )
                )
        self.num_units = len(self._ways) * len(config.chosen)

    @property
    def num_finished(self) -> int:
        """The number of finished units of work."""
        return sum(len(way.answered) for way in self._ways)

    @property
    def paths(self) -> list[Path]:
        """The files of the cells' answers."""
        return [way.path for way in self._ways]

    @property
    def exact(self) -> bool:
        """Whether all answers that must equal plain decoding's do so, except for near-ties."""
        return all(all_exact(way.run.rows) for way in self._ways)

    def measure(self) -> None:
        """Measure all unfinished units. Raises InputError if a row fails or writing fails."""
        for temperature in self._config.temperatures:
            ways = [way for way in self._ways if way.cell.temperature == temperature]
            self._programs.close_all_but([way.program for way in ways])
            plain, *others = ways
            sampling = plain.cell.config.sampling
            conversations = replace(self._conversations, sampling=sampling)
            for number, question in enumerate(self._config.chosen):
                order = [others[way] for way in turn_order(len(others), number)]
                left = [w for w in (plain, *order) if question.question_id not in w.answered]
                if not left:
                    continue
                # A resumed run repeats plain decoding, so that speeds are of the same minute.
                asked = [plain, *(way for way in left if way is not plain)]
                baseline: list[Answers] = []
                for way, answers in in_turn(conversations, [number], asked, self._decode):
                    if conversations.refused:
                        raise conversations.refused[0]
                    check_answered(conversations, way, answers)
                    baseline = baseline or answers
                    if way in left:
                        self._record(way, answers, baseline)
        for way in self._ways:
            way.file.finish()
        self._screen.rest()

    def _decode(self, way: _Way, turn: Turn) -> Generation:
        way.program.open(way.run.drafter, turn.requests, self._screen, way.clock)
        return way.decode(turn)

    def _record(self, way: _Way, answers: Sequence[Answers], baseline: Sequence[Answers]) -> None:
        """Append the rows of a finished unit to the cell's file, and show the progress.

        `answers` and `baseline` are what the cell and plain decoding answered, by turn.
        """
        (number,) = answers[0].turn.questions
        for one, plain in zip(answers, baseline, strict=True):
            same = None
            if way.cell.config.comparable:
                same = one.differences(way.plan, plain.result)
            batch = self._conversations.rows[number] + one.turn.number
            rows = one.rows(way.run.drafter, batch, self._config.chosen, plain.result, same)
            way.run.add(one.result, rows)
        way.answered.add(self._config.chosen[number].question_id)
        records = way.run.new_records()
        if len(way.answered) == len(self._config.chosen):
            end = summary(way.run, way.clock, memory_bandwidth=memory_bandwidth())
            records.append({"record": "summary", **end})
        way.file.add(records)
        seconds = sum(one.result.decode_s for one in answers)
        speed = sum(one.result.new_tokens for one in answers) / seconds
        done = self.num_finished
        self._screen.progress(way.name, done, self.num_units, speed, done / self.num_units)


def _conversations(config: SpecBenchConfig, model: Model) -> Conversations:
    """Return the conversations of a config. Raises InputError if the target has no room for one."""
    options, chat = config.options, has_chat_template(model)
    for question in config.chosen:
        if not chat and len(question.turns) > 1:
            raise InputError(
                f"turns={config.turns!r}: question {question.question_id} has several, and "
                f"{model.name} no chat template; use turns=first"
            )
    sampling = config.cells[0].config.sampling
    conversations = Conversations(
        model, config.chosen, sampling, chat, max_length=options.max_length
    )
    longest = longest_row(model, options.max_length)
    for index, question in enumerate(config.chosen):
        if conversations.num_tokens(index) > longest:
            raise InputError(
                f"question {question.question_id}: {len(conversations.last[index])} tokens and "
                f"answers of up to {config.max_new_tokens} do not fit into {longest}; lower "
                "max_new_tokens, use turns=first, or leave the question out"
            )
    rows = range(conversations.rows[-1])
    conversations.seeds = [derived_seed(options.seed, "spec_bench", row) for row in rows]
    return conversations
