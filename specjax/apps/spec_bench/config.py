"""The config of `specjax.spec_bench`, checked and divided into cells before any long work."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from specjax.apps.command_line.config_file import config_of, overridden
from specjax.apps.command_line.flags import Listed
from specjax.apps.command_line.mesh_config import MeshFields
from specjax.apps.report import picture_files
from specjax.apps.run.built_in_prompts import questions_of
from specjax.apps.run.decode_config import DecodeConfig, TargetFields
from specjax.core.none import PLAIN_DECODING
from specjax.engine.options import DRAFT_LENGTH, FIXED, DecodeOptions
from specjax.engine.requests import TEMPERATURE
from specjax.errors import InputError, one_line, shown
from specjax.fields import (
    Choice,
    Inline,
    InputFile,
    Items,
    OutputFolder,
    Text,
    Whole,
    dotted,
    fields_of,
    optional,
    read_values,
)
from specjax.loading.texts.questions import Question, digest, stratified, task_of
from specjax.methods.find_head import shipped_heads
from specjax.methods.ngram import NGRAM
from specjax.methods.registry import METHODS

ALL = "all"
_OF_A_DRAFTER = ("drafter.", "tree.", "typical.")
_MEASURED = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size", "batch_size")
"""Options of decoding that differ between cells, or say how many rows decode together: one."""
_ONE_ROW = DecodeOptions(batch_size=1)


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a drafter with its options at one temperature and draft length.

    `entry` is the drafter as the field `drafters` has it, and `config` the decode config.
    """

    entry: str
    config: DecodeConfig

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.config.sampling.temperature

    @property
    def length(self) -> int | str:
        """The draft length: a number, "fixed" or "auto"."""
        return self.config.options.num_speculative_tokens

    @property
    def file_name(self) -> str:
        """The name of the file with the cell's answers."""
        description = f"{self.entry}-{self.length}-t{self.temperature:g}"
        hashed = hashlib.sha256(description.encode()).hexdigest()[:8]
        return f"{re.sub(r'[^A-Za-z0-9.=+-]+', '_', description)[:100]}-{hashed}.jsonl"


@dataclass(frozen=True, kw_only=True)
class SpecBenchConfig(MeshFields, TargetFields):
    """The config of `specjax.spec_bench`; None means that specjax chooses."""

    prompts: Annotated[Path | None, optional(InputFile())] = None
    """A JSONL file in Spec-Bench's format; without it a few built-in prompts are used."""
    tasks: Annotated[str | tuple[str, ...], Listed(Text(), empty=True)] = ""
    """The tasks to measure, as qa,rag; by default all tasks of the file."""
    questions: Annotated[int | None, optional(Whole(1))] = None
    """The number of questions, divided equally among the tasks; by default all."""
    turns: Literal["first", "all"] = "all"
    """The turns to measure; with all, the answers of plain decoding become the history of the next
    turn.
    """

    drafters: Annotated[str, Text()] = ALL
    """The drafters, as ngram,eagle3,ngram+eagle3; all: those that need no training or come with the
    target. A name may be followed by options as of specjax.decode: eagle3 tree.kind=dynamic
    tree.num_nodes=32.
    """
    temperatures: Annotated[tuple[float, ...], Items(TEMPERATURE, least=1)] = (0.0,)
    """The sampling temperatures; 0 is greedy."""
    num_speculative_tokens: Annotated[tuple[int | str, ...], Items(DRAFT_LENGTH, least=1)] = (
        FIXED,
    )
    """Draft lengths: fixed, which is each drafter's own length; auto; or numbers, which for a tree
    count its first nodes. All numbers share one program per drafter, as wide as the longest.
    """
    options: Annotated[DecodeOptions, Inline({"batch_size": 1}, without=_MEASURED)] = _ONE_ROW
    max_new_tokens: Annotated[int, Whole(1)] = 128
    """The maximum number of tokens of an answer."""
    out: Annotated[str | Path, OutputFolder()] = "build/spec_bench"
    """The folder of the run, from which the same command resumes."""
    formats: Annotated[str | tuple[str, ...], Listed(Choice(picture_files.FORMATS))] = "svg,pdf"
    """Picture formats, among png,svg,pdf."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values of the config file and the command line as they were given, by section."""
    chosen: tuple[Question, ...] = ()
    """The questions to measure."""
    cells: tuple[Cell, ...] = ()
    """What is measured; the cells of each temperature begin with that of plain decoding."""

    def __post_init__(self) -> None:
        for name in ("temperatures", "num_speculative_tokens"):
            _refuse_repeated(name, getattr(self, name))

    @property
    def settings(self) -> dict[str, Any]:
        """The values, by field and JSON-ready, that must not change when a run is resumed."""
        left_out = ("out", "formats", "prompts")
        values = {key: value for key, value in self.written.items() if key not in left_out}
        values["drafters"] = ",".join(_entries(self))
        values["prompts"] = f"{len(self.chosen)} questions, {digest(self.chosen)}"
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dotted(values).items()
        }


def read_spec_bench_config(written: Mapping[str, Any]) -> SpecBenchConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    given = replace(read_values(SpecBenchConfig, written), written=written)
    return replace(given, chosen=tuple(_chosen(given)), cells=tuple(_cells(given)))


def _chosen(given: SpecBenchConfig) -> Sequence[Question]:
    """Return the questions to measure: those of the config's tasks, as many as it asks for."""
    questions = list(questions_of(given.prompts))
    tasks = list(dict.fromkeys(task_of(question.category) for question in questions))
    _refuse_repeated("tasks", given.tasks)
    for task in given.tasks:
        if task not in tasks:
            raise InputError(
                f"tasks={shown(task)}: no question is of that task; use {', '.join(tasks)}"
            )
    if given.tasks:
        questions = [
            question for question in questions if task_of(question.category) in given.tasks
        ]
    if given.turns == "first":
        questions = [
            Question(question.question_id, question.category, question.turns[:1])
            for question in questions
        ]
    return questions if given.questions is None else stratified(questions, given.questions)


def _cells(given: SpecBenchConfig) -> Iterator[Cell]:
    """Yield the cells by temperature, beginning with that of plain decoding."""
    entries = _entries(given)
    for temperature in given.temperatures:
        yield _cell(given, PLAIN_DECODING, temperature, FIXED)
        for entry, length in itertools.product(entries, given.num_speculative_tokens):
            yield _cell(given, entry, temperature, length)


def _entries(given: SpecBenchConfig) -> list[str]:
    """Return the drafters, each with its options as one text; `all` is replaced by its drafters."""
    entries: list[str] = []
    for text in _split(given.drafters):
        entry = " ".join(text.split())
        if not entry:
            raise InputError(f"drafters={given.drafters!r}: name drafters such as ngram,eagle3")
        if entry.split()[0] == PLAIN_DECODING:
            raise InputError(
                f"drafters={shown(entry)}: plain decoding is measured anyway; leave it out"
            )
        entries += _all_drafters(given.target) if entry == ALL else [entry]
    _refuse_repeated("drafters", entries)
    return entries


def _all_drafters(target: str) -> list[str]:
    """Return the drafters that need no training, and those with weights for the target."""
    shipped = shipped_heads().get(target, [])
    listed = {name: method for name, method in METHODS.items() if method.in_all}
    names = [name for name, method in listed.items() if not method.needs.weights]
    names += [name for name, method in listed.items() if method.needs.weights and name in shipped]
    joined = [name for name in shipped if METHODS[name].joined_in_all]
    return [*names, *(f"{NGRAM.name}+{name}" for name in joined)]


def _cell(given: SpecBenchConfig, entry: str, temperature: float, length: int | str) -> Cell:
    """Return the cell of an entry at a temperature and draft length. Raises InputError."""
    config = _decode_fields(entry)
    shared = fields_of(SpecBenchConfig).keys() & config.keys()
    config |= {name: value for name, value in given.written.items() if name in shared}
    config["prompts"] = None if given.prompts is None else str(given.prompts)
    config["num_speculative_tokens"] = length
    config["sampling"] |= {"temperature": temperature, "max_new_tokens": given.max_new_tokens}
    try:
        return Cell(entry, replace(read_values(DecodeConfig, config), written=config))
    except InputError as error:
        raise InputError(f"drafters={shown(entry)}: {one_line(error)}") from None


def _decode_fields(entry: str) -> dict[str, Any]:
    """Return a decode config with the drafter and the options of an entry, as a new dict."""
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in _overridden_fields(entry).items()
    }


@functools.lru_cache
def _overridden_fields(entry: str) -> dict[str, Any]:
    """Return a decode config with the drafter and the options of an entry. Raises InputError."""
    name, *options = entry.split()
    for option in options:
        if not option.startswith(_OF_A_DRAFTER) or "=" not in option:
            raise InputError(
                f"drafters={shown(entry)}: {option!r} is no option of a drafter; use "
                "drafter.FIELD=VALUE or tree.FIELD=VALUE, as of specjax.decode"
            )
    overrides = [f"--config.drafter.name={name}", *(f"--config.{option}" for option in options)]
    try:
        return overridden(config_of(DecodeConfig), overrides, DecodeConfig).to_dict()
    except InputError as error:
        raise InputError(f"drafters={shown(entry)}: {one_line(error)}") from None


def _refuse_repeated(name: str, values: Sequence[Any]) -> None:
    """Raise InputError, naming the field, if a value occurs twice."""
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{name}: {shown(value)} is given twice; name each once")


def _split(values: str) -> Iterator[str]:
    """Yield the texts between commas that are outside of brackets."""
    depth, begin = 0, 0
    for index, letter in enumerate(values):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield values[begin:index]
            begin = index + 1
    yield values[begin:]
