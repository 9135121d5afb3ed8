"""Measure the cells of a Spec-Bench run, question by question, saving finished answers.

Plain decoding comes first on each question; its answers are the history of later turns, for all
drafters alike. The drafters follow, in an order that varies by question. A unit of work is a
question with one cell: its rows are appended to the cell's file together, and a resumed run skips
the unit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from specjax.apps.command_line.console import Screen
from specjax.apps.rows.compare_outputs import compare_row
from specjax.apps.rows.decode_report import Clock, DrafterRun, device_name, summary, tree_record
from specjax.apps.rows.records import Conditions, RunHeader
from specjax.apps.rows.report_file import ReportFile
from specjax.apps.run.decode_config import ConfigDrafter, load_target
from specjax.apps.run.ways import Way, turn_order
from specjax.apps.spec_bench.answers_file import finished_rows
from specjax.apps.spec_bench.config import Cell, SpecBenchConfig
from specjax.apps.spec_bench.programs import Programs
from specjax.apps.tuning.weight_bandwidth import memory_bandwidth, pass_bytes
from specjax.controllers import Fixed
from specjax.drafters import DRAFTER_KIND
from specjax.engine.engine import Engine
from specjax.engine.generate import Generation, decode_requests
from specjax.engine.options import AUTO
from specjax.engine.outputs import failure_message
from specjax.engine.plan import DecodePlan, longest_row
from specjax.engine.requests import Request, encode_prompt
from specjax.errors import InputError
from specjax.files.package_versions import versions
from specjax.loading.model import Model
from specjax.loading.texts.questions import Question
from specjax.sampling import derived_seed


@dataclass(kw_only=True)
class _Way(Way):
    """A cell while it is measured: its program, its answers so far, and its file."""

    cell: Cell
    run: DrafterRun
    path: Path
    file: ReportFile
    clock: Clock = field(default_factory=Clock)

    @property
    def label(self) -> str:
        """The drafter with its options, and its draft length if that is a number."""
        return self.cell.entry if self.limit is None else f"{self.cell.entry}, {self.limit}"

    @property
    def limit(self) -> int | None:
        """The maximum number of draft tokens, if the draft length is a number."""
        return self.cell.length if isinstance(self.cell.length, int) else None

    @property
    def longest_path(self) -> int | None:
        """The maximum number of tokens on a path of a draft; in a chain, at most the limit."""
        drafter = self.plan.loop.drafter
        longest = drafter.num_speculative_tokens
        if self.limit is None or any(part.branches for part in drafter.parts):
            return longest
        return min(longest, self.limit)

    @functools.cached_property
    def answered(self) -> set[int | str]:
        """The ids of the finished questions."""
        return {row.question_id for row in self.run.rows}

    @property
    def engine_key(self) -> Any:
        """A key that is equal for cells that may share an engine.

        The controller `auto` learns, so such a cell shares its engine with no other.
        """
        return self.cell.entry, self.plan.loop, self.cell.length == AUTO


_Answer = tuple[DecodePlan, Request, Generation]
"""A plan, a request, and its result."""


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
            self._prompts = [_encoded(config, self.model, question) for question in config.chosen]
            capacity = max(
                _longest(config, self.model, question, ids[-1])
                for question, ids in zip(config.chosen, self._prompts, strict=True)
            )
            programs = Programs(config, self.model, capacity, screen)
            self._ways = []
            for cell, path, done in zip(config.cells, paths, rows, strict=True):
                made = programs.drafter(cell)
                header = _header(cell, self.model, mesh, made)
                reported = len(done) or -1
                self._ways.append(
                    _Way(
                        header.drafter,
                        programs.plan(cell),
                        cell=cell,
                        run=DrafterRun(header, made.trees, rows=done, num_reported=reported),
                        path=path,
                        file=ReportFile(path, screen.say, resumed=bool(done)),
                    )
                )
        self._engines: dict[Any, Engine] = {}
        counts = [len(question.turns) for question in config.chosen]
        self._first_batch = list(itertools.accumulate(counts, initial=0))
        """The number of turns of all earlier questions, by question."""
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
        return all(
            row.difference is not None and row.difference.excused
            for way in self._ways
            for row in way.run.rows
            if row.identical is False
        )

    def measure(self) -> None:
        """Measure all unfinished units. Raises InputError if a row fails or writing fails."""
        for temperature in self._config.temperatures:
            ways = [way for way in self._ways if way.cell.temperature == temperature]
            self._close_all_but(ways)
            plain, *others = ways
            for number, question in enumerate(self._config.chosen):
                order = [others[way] for way in turn_order(len(others), number)]
                left = [w for w in (plain, *order) if question.question_id not in w.answered]
                if not left:
                    continue
                # A resumed run repeats plain decoding, so that speeds are of the same minute.
                baseline = list(self._answers(plain, number, ()))
                texts = [answer.texts[0] for *_, answer in baseline]
                for way in left:
                    answers = baseline if way is plain else self._answers(way, number, texts)
                    self._record(way, number, list(answers), baseline)
        for way in self._ways:
            way.file.finish()
        self._screen.rest()

    def _answers(self, way: _Way, number: int, history: Sequence[str]) -> Iterator[_Answer]:
        """Yield the plan, request and answer of a cell for each turn of question `number`.

        `history` are the answers to earlier turns; if it is empty, they are the cell's texts.
        """
        engine, texts = self._engine(way), []
        question = self._config.chosen[number]
        for turn in range(len(question.turns)):
            prompt = self._prompts[number][turn]
            if turn:
                conversation = _conversation(question, turn, history or texts)
                prompt = encode_prompt(self.model, conversation, _name(question, turn))
            row = self._first_batch[number] + turn
            seed = derived_seed(self._config.options.seed, "spec_bench", row)
            request = Request(0, tuple(prompt), replace(way.cell.config.sampling, seed=seed))
            answer = decode_requests(engine.plan, [request], engine=engine)
            if answer.failed_rows:
                failed = {f"{_name(question, turn)}, with {way.label}": answer.failed_rows[0]}
                raise InputError(failure_message(self.model, failed))
            texts.append(answer.texts[0])
            yield engine.plan, request, replace(answer, longest_path=way.longest_path)

    def _engine(self, way: _Way) -> Engine:
        """Return the engine for a cell, compiled when it is first used."""
        way.engine = self._engines.get(way.engine_key)
        request = Request(0, tuple(self._prompts[0][0]), way.cell.config.sampling)
        engine = self._engines[way.engine_key] = way.open([request], self._screen, way.clock)
        if way.limit is not None:
            engine.control(Fixed(way.limit))
        return engine

    def _close_all_but(self, ways: Sequence[_Way]) -> None:
        """Free the caches of engines that none of `ways` uses."""
        for key in self._engines.keys() - {way.engine_key for way in ways}:
            self._engines.pop(key).close()

    def _record(
        self,
        way: _Way,
        number: int,
        found: Sequence[_Answer],
        baseline: Sequence[_Answer],
    ) -> None:
        """Append the rows of a finished unit to the cell's file, and show the progress.

        `found` and `baseline` are what the cell and plain decoding answered, by turn.
        """
        question = self._config.chosen[number]
        for turn, ((plan, request, answer), (*_, plain)) in enumerate(
            zip(found, baseline, strict=True)
        ):
            differences = None
            if way.cell.config.comparable:
                differences = [compare_row(plan, request, answer.token_ids[0], plain.token_ids[0])]
            batch = self._first_batch[number] + turn
            way.run.add(batch, turn, [question], answer, plain, differences)
        way.answered.add(question.question_id)
        records = way.run.new_records()
        if len(way.answered) == len(self._config.chosen):
            end = summary(way.run, way.clock, memory_bandwidth=memory_bandwidth())
            records.append({"record": "summary", **end})
        way.file.add(records)
        answers = [answer for *_, answer in found]
        seconds = sum(answer.decode_s for answer in answers)
        speed = sum(answer.new_tokens for answer in answers) / seconds
        done = self.num_finished
        self._screen.progress(way.label, done, self.num_units, speed, done / self.num_units)


def _encoded(config: SpecBenchConfig, model: Model, question: Question) -> list[list[int]]:
    """Return the token ids of each turn's prompt, assuming empty answers to earlier turns."""
    chat = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if not chat and len(question.turns) > 1:
        raise InputError(
            f"turns={config.turns!r}: question {question.question_id} has several, and "
            f"{model.name} no chat template; use turns=first"
        )
    empty = [""] * len(question.turns)
    return [
        encode_prompt(
            model,
            _conversation(question, turn, empty) if chat else question.turns[0],
            _name(question, turn),
        )
        for turn in range(len(question.turns))
    ]


def _longest(config: SpecBenchConfig, model: Model, question: Question, ids: Sequence[int]) -> int:
    """Return the maximum number of tokens of a question's turns and answers.

    `ids` are the tokens of its last prompt. Raises InputError if the target has no room for them.
    """
    longest = longest_row(model, config.options.max_length)
    # An answer's text is rarely encoded in more tokens than were decoded.
    needed = len(ids) + len(question.turns) * config.max_new_tokens
    if needed > longest:
        raise InputError(
            f"question {question.question_id}: {len(ids)} tokens and answers of up to "
            f"{config.max_new_tokens} do not fit into {longest}; lower max_new_tokens, use "
            "turns=first, or leave the question out"
        )
    return needed


def _conversation(question: Question, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
    """Return the messages of a question up to the user's message of turn `turn`."""
    messages = [{"role": "user", "content": question.turns[0]}]
    for text, answer in zip(question.turns[1 : turn + 1], answers, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    return messages


def _name(question: Question, turn: int) -> str:
    """Return the name of a turn of a question in errors."""
    return f"question {question.question_id}" + (f", turn {turn + 1}" if turn else "")


def _header(cell: Cell, model: Model, mesh: Mesh | None, made: ConfigDrafter) -> RunHeader:
    """Return the description of a cell, in the form of a decode run's."""
    config = cell.config
    (drafter,) = config.drafters
    return RunHeader(
        drafter=drafter.name,
        target=config.target,
        conditions=Conditions(
            device=device_name(mesh),
            dtype=model.weights,
            batch_size=1,
            temperature=cell.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
        ),
        lossy=config.lossy,
        versions=versions(),
        trees={name: tree_record(chosen) for name, chosen in made.trees.items()},
        config=config.written_for(drafter),
        drafter_bytes=DRAFTER_KIND.check("drafter", made.loaded).own_bytes(model.params),
        pass_bytes=pass_bytes(model),
    )
