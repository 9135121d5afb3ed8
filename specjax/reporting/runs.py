"""Decode runs read back from reports: rows with raw counts, labels, conditions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax import metrics
from specjax.decoding.compare_outputs import EXCUSED_MARGIN
from specjax.decoding.prompts import task_of
from specjax.errors import InputError
from specjax.fields import dotted


@dataclass(frozen=True)
class Timing:
    """Tokens and seconds of one decoding; the seconds are of all rows decoded with the row."""

    new_tokens: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Row:
    """One answer: its text, timings with the drafter and plain, and one count per round.

    `drafter` is the number of the drafter that drafted in each round, -1 for none; empty where a
    report does not say. `batch` is the number of the group that the row was decoded with, and
    `first_round` are the group's rounds before the row's first.
    """

    question_id: int | str
    category: str
    turn: int
    text: str
    token_ids: tuple[int, ...]
    batch: int
    ours: Timing
    plain: Timing | None
    identical: bool | None
    margin: float | None
    resolution: float | None
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    width: tuple[int, ...]
    drafter: tuple[int, ...] = ()
    first_round: int = 0

    @property
    def task(self) -> str:
        """Spec-Bench's task; MT-bench's eight categories are one, and no category is `other`."""
        return task_of(self.category) or "other"


@dataclass(frozen=True)
class Run:
    """What a report says of one drafter."""

    path: Path
    rows: tuple[Row, ...]
    summary: Mapping[str, Any]

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's whole config."""
        return self.summary["config"]

    @property
    def interrupted(self) -> bool:
        """Whether the run ended, or was killed, before all of its prompts were answered."""
        return bool(self.summary.get("interrupted"))

    @property
    def refused(self) -> str | None:
        """The error of a later turn that could not be decoded, such as one that has no room."""
        return self.summary.get("refused")

    @property
    def lossy(self) -> bool:
        """Whether the rule changed the distribution of the output."""
        return bool(self.summary.get("lossy"))

    @property
    def drafter(self) -> str:
        """The drafter's name."""
        return self.summary["drafter"]

    @property
    def longest_path(self) -> int | None:
        """The tokens of a draft's longest path, where something was drafted."""
        return len(self.summary.get("acceptance_at_pos") or ()) or None

    @property
    def exact(self) -> bool:
        """Whether all rows equal plain decoding's, except for near-ties."""
        # Reports of earlier versions have no resolution: they excused near-ties in float32.
        known = EXCUSED_MARGIN if self.summary["dtype"] == "float32" else 0.0
        different = [row for row in self.rows if row.identical is False]
        return all(
            row.margin is not None and row.margin < (row.resolution or known) for row in different
        )

    @property
    def conditions(self) -> Conditions:
        """The conditions of the run that affect its speed."""
        sampling = self.config["sampling"]
        return Conditions(
            device=self.summary["device"],
            dtype=self.summary["dtype"],
            batch_size=self.config["batch_size"],
            temperature=float(sampling["temperature"]),
            max_new_tokens=sampling["max_new_tokens"],
        )

    @property
    def auto(self) -> bool:
        """Whether draft lengths were chosen while decoding."""
        return self.config.get("num_speculative_tokens") == "auto"

    @property
    def draft_length(self) -> int | None:
        """K of the config, or the longest draft's length where the drafter chooses it.

        None for "auto" and for a run that drafted nothing.
        """
        if self.drafter == "none":
            return None
        asked = str(self.config.get("num_speculative_tokens"))
        if asked in ("None", "fixed"):
            longest = max((max(row.drafted, default=0) for row in self.rows), default=0)
            return longest or None
        return int(asked) if asked.isdecimal() and len(asked) < 10 else None


@dataclass(frozen=True, order=True)
class Conditions:
    """What must be equal for two speeds to be comparable; as text, the heading of a table."""

    device: str
    dtype: str
    batch_size: int
    temperature: float
    max_new_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.device}, {self.dtype}, batch size {self.batch_size}, "
            f"temperature {self.temperature:g}, up to {self.max_new_tokens} new tokens"
        )


@dataclass(frozen=True)
class Bench:
    """A report of `specjax.bench`: its comparisons with plain decoding, the field `comparisons`."""

    path: Path
    comparisons: tuple[Mapping[str, Any], ...]
    interrupted: bool


def check_together(runs: Sequence[Run]) -> None:
    """Raise InputError unless all runs decoded the same prompts with the same target."""
    first = runs[0]
    for run in runs[1:]:
        ours, theirs = run.config["target"], first.config["target"]
        if ours != theirs:
            raise InputError(
                f"target: {str(run.path)!r} is of {ours}, {str(first.path)!r} of {theirs}; "
                "report each target separately"
            )
        if run.summary["prompts"] != first.summary["prompts"]:
            pairs = ((one, len(one.rows)) for one in (run, first))
            sizes = " and ".join(f"{str(one.path)!r} ({count} rows)" for one, count in pairs)
            remedies = [
                f"{str(one.path)!r} was interrupted: run it again"
                if one.interrupted
                else f"a later turn of {str(one.path)!r} was refused: {one.refused}"
                for one in (run, first)
                if one.interrupted or one.refused
            ]
            raise InputError(
                f"prompts: {sizes} answer other prompts; "
                + next(iter(remedies), "report each set separately")
            )


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its drafter, and the fields in which the runs differ."""
    fields = [_distinguishing_fields(run) for run in runs]
    names = dict.fromkeys(name for one in fields for name in one)
    differing = [name for name in names if len({str(one.get(name)) for one in fields}) > 1]
    found = []
    for run, one in zip(runs, fields, strict=True):
        parts = [run.drafter, *(["(lossy)"] if run.lossy else [])]
        for name in differing:
            value = one.get(name)
            if value is not None and name != "drafter.name":
                parts.append(f"{name.rpartition('.')[2]}={value}")
        found.append(" ".join(parts))
    # The least of a path that tells equal names apart: its stem, then folders above it.
    for above in range(max((len(run.path.parts) for run in runs), default=1)):
        named = [
            f"{label} ({Path(*run.path.parts[-1 - above :]).with_suffix('')})"
            if found.count(label) > 1
            else label
            for run, label in zip(runs, found, strict=True)
        ]
        if len(set(named)) == len(named):
            return named
    # One file twice, or two that differ by their suffixes.
    return [f"{label}, {number}" for number, label in enumerate(named, 1)]


def summarize(rows: Sequence[Row], positions: int | None = None) -> metrics.Summary:
    """The summary of some rows (`specjax.metrics`). Raises ValueError for inconsistent counts.

    `positions` are the tokens of the longest path of a draft, where that is known.
    """
    return metrics.summarize(
        *(_padded(getattr(row, name) for row in rows) for name in ("drafted", "accepted")),
        *(_padded(getattr(row, name) for row in rows) for name in ("emitted", "width")),
        positions,
    )


def batch_widths(rows: Sequence[Row]) -> np.ndarray:
    """The width of each pass [R]; a pass has one width for all rows that decode together."""
    batches: dict[int, list[tuple[int, ...]]] = {}
    for row in rows:
        widths = (0,) * row.first_round + tuple(row.width)
        batches.setdefault(row.batch, []).append(widths)
    passes = np.concatenate([_padded(widths).max(axis=0) for widths in batches.values()])
    return passes[passes > 0]


def _distinguishing_fields(run: Run) -> dict[str, Any]:
    """The fields by which runs may differ: the config's, less those shown elsewhere."""
    elsewhere = ("report", "compare", "batch_size", "dtype")
    elsewhere += ("sampling.temperature", "sampling.max_new_tokens")
    # Prompts are compared by content: two paths may name the same ones.
    elsewhere += ("target", "prompt", "prompts", "limit", "per_task", "num_speculative_tokens")
    fields = {name: value for name, value in dotted(run.config).items() if name not in elsewhere}
    return {"K": "auto" if run.auto else run.draft_length, **fields}


def _padded(rows: Iterable[Sequence[int]]) -> np.ndarray:
    rows = list(rows)
    array = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
    for index, row in enumerate(rows):
        array[index, : len(row)] = row
    return array
