"""The records of a decode run's report, one per line of JSON, and a reader for them.

The `run` record of a drafter precedes its `row` records, which are added as prompts finish; a
`summary` record of each drafter comes at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from specjax.apps.rows.compare_outputs import Difference, NearTie
from specjax.core.none import PLAIN_DECODING
from specjax.errors import InputError, printable, shown
from specjax.fields import (
    Either,
    Inline,
    Instance,
    Items,
    Number,
    Whole,
    check_values,
    optional,
    read_values,
)
from specjax.files.json_files import parse_json, read_json_lines
from specjax.files.path_checks import input_file
from specjax.loading.texts.questions import LARGEST_ID, task_of

_MOST_COUNTS, _MOST_LEVELS = 1 << 26, 20
"""The maximum size of a table of all rows' counts, and the maximum nesting of a config."""
_TEXT = Instance(str, "use a text")
_ID = Either((Whole(-LARGEST_ID, LARGEST_ID), _TEXT), remedy="use a whole number, or a text")
_COUNTS = Items(Whole(most=2**53), remedy="use whole numbers of at least 0, one per round")
_SECONDS = Number(0.0, 2.0**53)
_SPEED = Number(0.0, 1e12, above=True)
_SPEEDS = Items(_SPEED, length=2, remedy="use tokens/s, and those of plain decoding")
_OBJECT = Instance(dict, "use an object")
_REMEDY = "give a file that `python -m specjax.decode --config.report=FILE` wrote"


@dataclass(frozen=True)
class NearTieKind:
    """The field type of near-ties in JSON, where a non-finite margin is null."""

    def check(self, name: str, value: Any) -> NearTie:
        """Return `value`, a dict of a near-tie's fields, as a `NearTie`.

        Raises InputError, which names the field `name`, for any other value.
        """
        _OBJECT.check(name, value)
        number = optional(Number(-1e30))
        fields = check_values({"index": Whole(), "margin": number, "resolution": number}, value)
        return NearTie(**{name: math.nan if x is None else x for name, x in fields.items()})


@dataclass(frozen=True)
class ConfigKind:
    """The field type of a whole config, a dict by section."""

    def check(self, name: str, value: Any) -> dict[str, Any]:
        """Return `value` unchanged.

        Raises InputError, which names the field `name`, if it is no dict or is nested too deeply.
        """
        _OBJECT.check(name, value)
        level = [value]
        for _ in range(_MOST_LEVELS):
            level = [
                value for section in level for value in section.values() if isinstance(value, dict)
            ]
        if level:
            raise InputError(f"{name} has more than {_MOST_LEVELS} levels")
        return value


@dataclass(frozen=True)
class DecodedRow:
    """One answer, with the counts of its rounds and its times in seconds.

    `emitted` counts the tokens of each round, and `drafter_index` is the drafter whose turn it was,
    -1 for none. `prefill_s` and `decode_s` cover all rows of its `batch`, the group decoded
    together; `plain_*` are the same for plain decoding, None if it was not run; `plain_passes` are
    all passes of the group, None in older reports too. `first_round` is the group's round in which
    the row began. `prompt_hash` is a hash of the question. If the group
    was decoded several times, the row is from the repeat with the median speed-up, and
    `repeated_speeds` are tokens/s of the drafter and of plain decoding in each repeat.
    """

    drafter: Annotated[str, _TEXT]
    question_id: Annotated[int | str, _ID]
    category: Annotated[str, _TEXT]
    turn: Annotated[int, Whole()]
    prompt_hash: Annotated[str, _TEXT]
    token_ids: Annotated[tuple[int, ...], Items(Whole(), remedy="use token ids")]
    text: Annotated[str, _TEXT]
    finish_reason: Annotated[str, _TEXT]
    text_error: Annotated[str | None, optional(_TEXT)]
    logprobs: Annotated[
        tuple[float | None, ...] | None, optional(Items(optional(Number(-1e30, 1e30))))
    ]
    drafted: Annotated[tuple[int, ...], _COUNTS]
    accepted: Annotated[tuple[int, ...], _COUNTS]
    emitted: Annotated[tuple[int, ...], _COUNTS]
    width: Annotated[tuple[int, ...], _COUNTS]
    drafter_index: Annotated[tuple[int, ...], Items(Whole(-1))]
    longest_path: Annotated[int | None, optional(Whole())]
    batch: Annotated[int, Whole()]
    first_round: Annotated[int, Whole(0, 1_000_000)]
    prefill_s: Annotated[float, _SECONDS]
    decode_s: Annotated[float, _SECONDS]
    waiting_s: Annotated[float | None, optional(_SECONDS)]
    first_token_s: Annotated[float | None, optional(_SECONDS)]
    total_s: Annotated[float, _SECONDS]
    plain_new_tokens: Annotated[int | None, optional(Whole())]
    plain_prefill_s: Annotated[float | None, optional(_SECONDS)]
    plain_decode_s: Annotated[float | None, optional(_SECONDS)]
    identical: Annotated[bool | None, optional(Instance(bool, "use true or false"))]
    near_ties: Annotated[tuple[NearTie, ...], Items(NearTieKind())]
    repeated_speeds: Annotated[tuple[tuple[float, float], ...], Items(_SPEEDS)]
    plain_passes: Annotated[int | None, optional(Whole())] = field(default=None, kw_only=True)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> DecodedRow:
        """Return the row of a record, which may lack `plain_passes`. Raises InputError."""
        return read_values(cls, {"plain_passes": None, **record})

    def __post_init__(self) -> None:
        rounds = len(self.emitted)
        for name in ("drafted", "accepted", "width", "drafter_index"):
            if len(getattr(self, name)) != rounds:
                raise InputError(f"{name} must have one entry per round, as emitted has")
        counts = zip(self.accepted, self.drafted, strict=True)
        if any(accepted > drafted for accepted, drafted in counts):
            raise InputError("accepted exceeds drafted in some round")
        if sum(self.emitted) != len(self.token_ids):
            raise InputError("emitted does not add up to the number of token_ids")
        plain = (self.plain_new_tokens, self.plain_prefill_s, self.plain_decode_s)
        if len({value is None for value in plain}) > 1:
            raise InputError("plain_new_tokens, plain_prefill_s, plain_decode_s: give all or none")

    @property
    def new_tokens(self) -> int:
        """The number of tokens of the answer."""
        return len(self.token_ids)

    @property
    def difference(self) -> Difference | None:
        """The answer's difference from plain decoding; None if it is equal or was not compared."""
        return Difference(self.near_ties) if self.near_ties else None

    @property
    def task(self) -> str:
        """The Spec-Bench task: that of the category, or `other` for a row without a category.

        The categories of MT-bench together are one task.
        """
        return task_of(self.category) or "other"


def all_exact(rows: Iterable[DecodedRow]) -> bool:
    """Return whether all compared rows equal plain decoding, except at near-ties."""
    return all(
        row.difference is not None and row.difference.excused
        for row in rows
        if row.identical is False
    )


@dataclass(frozen=True, order=True)
class Conditions:
    """The conditions under which two speeds are comparable; as text, the heading of a table."""

    device: Annotated[str, _TEXT]
    dtype: Annotated[str, _TEXT]
    batch_size: Annotated[int, Whole(1)]
    temperature: Annotated[float, Number()]
    max_new_tokens: Annotated[int, Whole(1)]

    def __str__(self) -> str:
        return printable(
            f"{self.device}, {self.dtype}, batch size {self.batch_size}, "
            f"temperature {self.temperature:g}, up to {self.max_new_tokens} new tokens"
        )


@dataclass(frozen=True)
class RunHeader:
    """What is known about a run with one drafter before it starts.

    `config` is the command's config, reduced to this drafter. `lossy` is true if the acceptance
    rule changes the output distribution. `versions` maps names of packages to their versions, and
    `trees` maps the name of each part of the drafter to the tree chosen for it. `drafter_bytes` is
    the size of the drafter's own parameters in memory, and `pass_bytes` the bytes of the target's
    weights that a plain pass over a full batch reads (`tuning.weight_bandwidth`); None if it is not
    known.
    """

    drafter: Annotated[str, _TEXT]
    target: Annotated[str, _TEXT]
    conditions: Annotated[Conditions, Inline()]
    lossy: bool
    versions: Annotated[Mapping[str, str], _OBJECT]
    trees: Annotated[Mapping[str, Any], _OBJECT]
    config: Annotated[Mapping[str, Any], ConfigKind()]
    drafter_bytes: Annotated[int | None, optional(Whole(most=2**53))] = field(
        default=None, kw_only=True
    )
    pass_bytes: Annotated[int | None, optional(Whole(most=2**53))] = field(
        default=None, kw_only=True
    )

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> RunHeader:
        """Return the header that `record` made, which may lack `drafter_bytes` and `pass_bytes`.

        Raises InputError for a record of something else.
        """
        return read_values(cls, {"drafter_bytes": None, "pass_bytes": None, **record})

    def record(self) -> dict[str, Any]:
        """Return the header as a JSON-ready record."""
        values = asdict(self)
        return {**values.pop("conditions"), **values}

    @property
    def auto(self) -> bool:
        """Whether draft lengths were chosen while decoding."""
        return self.config.get("num_speculative_tokens") == "auto"


@dataclass(frozen=True)
class RunEnd:
    """The way in which a run with one drafter ended.

    `interrupted` says that some prompts were not answered, and `refused` is the error of a later
    turn that could not be decoded, for example because it did not fit. `memory_bandwidth` is what
    the machine's memory moves in bytes per second, None if it was not measured.
    """

    interrupted: bool
    refused: Annotated[str | None, optional(_TEXT)]
    memory_bandwidth: Annotated[float | None, optional(Number(0.0, 1e18, above=True))] = None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> RunEnd:
        """Return the end in a summary, which may lack `memory_bandwidth`. Raises InputError."""
        names = [field.name for field in fields(cls) if field.name in record]
        return read_values(cls, {"memory_bandwidth": None, **{n: record[n] for n in names}})


@dataclass(frozen=True)
class Run(RunHeader):
    """The run of one drafter in a report; a killed run counts as interrupted.

    `num_left_out` counts the answers that `rows` lacks since a run beside it has none.
    """

    path: Path
    rows: tuple[DecodedRow, ...]
    end: RunEnd
    num_left_out: int = 0

    @property
    def exact(self) -> bool:
        """Whether all compared rows equal plain decoding, except at near-ties."""
        return all_exact(self.rows)

    @property
    def prompts(self) -> tuple[tuple[int, str], ...]:
        """The number of the turn and a hash of the question of each answer, for comparing runs."""
        return tuple(sorted((row.turn, row.prompt_hash) for row in self.rows))

    @property
    def draft_length(self) -> int | None:
        """The K of the config, or the length of the longest draft if the drafter sets it.

        None for "auto" and for a run that drafted nothing.
        """
        if self.drafter == PLAIN_DECODING:
            return None
        length = str(self.config.get("num_speculative_tokens"))
        if length in ("None", "fixed"):
            longest = max((max(row.drafted, default=0) for row in self.rows), default=0)
            return longest or None
        return int(length) if length.isdecimal() and len(length) < 10 else None


def read_report(path: str | Path) -> Run:
    """Return the run in a report of a single drafter. Raises InputError for other files."""
    runs = read_reports(path)
    if len(runs) > 1:
        raise InputError(
            f"{str(path)!r} has runs of {len(runs)} drafters: give the report of one drafter"
        )
    return runs[0]


def read_reports(path: str | Path) -> tuple[Run, ...]:
    """Return the runs in a report of `specjax.decode`. Raises InputError for other files."""
    headers: dict[str, RunHeader] = {}
    rows: dict[str, list[DecodedRow]] = {}
    ends: dict[str, RunEnd] = {}
    file = input_file("report", path)
    for where, record in read_json_lines(file, "report", unfinished=True):
        kind, drafter = record.pop("record", None), str(record.get("drafter"))
        try:
            if kind == "run":
                if drafter in headers:
                    raise InputError(
                        f"a second run of drafter={shown(drafter)}: keep two runs in two files"
                    )
                headers[drafter] = RunHeader.read(record)
                rows[drafter] = []
            elif drafter not in headers:
                raise InputError(f"record={shown(kind)}, drafter={shown(drafter)}: no such run")
            elif kind == "row":
                rows[drafter].append(DecodedRow.read(record))
            elif kind == "summary":
                ends[drafter] = RunEnd.read(record)
            else:
                raise InputError(f"record={shown(kind)}: use run, row or summary")
        except InputError as error:
            raise InputError(f"{where} is no record of a report: {error}; {_REMEDY}") from None
    killed = RunEnd(interrupted=True, refused=None)
    runs = tuple(
        Run(**vars(header), path=file, rows=tuple(rows[name]), end=ends.get(name, killed))
        for name, header in headers.items()
    )
    for run in runs:
        if len(run.rows) * max((len(row.emitted) for row in run.rows), default=0) > _MOST_COUNTS:
            raise InputError(
                f"{str(path)!r}: one row has so many rounds that a table of all rows is too large"
            )
    if not all(run.rows for run in runs) or not runs:
        raise InputError(f"{str(path)!r} holds no rows; {_REMEDY}")
    return runs


def is_report(path: Path) -> bool:
    """Return whether a file's first line is the first record of a report.

    Raises OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    try:
        record = parse_json(line, str(path))
    except InputError:
        return False
    return isinstance(record, dict) and record.get("record") in ("run", "bench")
