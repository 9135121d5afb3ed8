"""The directory of a run: config.json, metrics.jsonl, checkpoints/, tensorboard/, export/, best/.

The first process writes the small files, but all processes must make the calls. For the contents of
checkpoints see `train.run.checkpoints`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.distributed import processes
from specjax.errors import InputError, shown
from specjax.fields import dotted
from specjax.files import atomic_writes, folders
from specjax.files.folder_checksums import Kind
from specjax.files.json_files import parse_json, read_json_file
from specjax.files.open_files import open_regular
from specjax.files.path_checks import output_folder
from specjax.loading.storage.orbax_saver import Numbered

MAY_DIFFER = (
    "workdir",
    "steps",
    "minutes",
    "log_every",
    "checkpoint_every",
    "remat",
    "fsdp",
    "eval.",
    "mesh.",
    "distributed.",
)
"""Fields, and sections followed by a dot, that may change when a run is resumed."""

KIND: Kind = "training run"
"""The kind of folder that the marker of a run's folder states."""
STEPS = Numbered("step", digits=9)
"""The folders of checkpoints."""

_RESTORE = "restore it, or delete it"
_SHOWN = 8


@dataclass(frozen=True)
class RunFolder:
    """The field type of a run's folder: new, empty, or of an earlier run."""

    def check(self, name: str, value: Any) -> str:
        """Return `value`, the path of a folder that is new, empty, or of an earlier run.

        Raises InputError, which names the field `name`, otherwise.
        """
        if value is None:
            raise InputError(f"{name} is missing: pass --config.{name}=DIRECTORY")
        root = output_folder(name, value)
        folders.check_claimable(root, KIND, f"{name}={str(value)!r}")
        return str(value)


@dataclass(frozen=True)
class Workdir:
    """The paths in the directory of a run."""

    root: Path

    @property
    def config(self) -> Path:
        """The file that identifies the run: its config, its target and its data."""
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        """The file with a line of numbers for each logged step."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, each of which is a folder in it."""
        return self.root / "checkpoints"

    @property
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return STEPS.numbers(self.checkpoints)

    @property
    def tensorboard(self) -> Path:
        """The folder with the same numbers for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def export(self) -> Path:
        """The folder of the trained head or model; of both, in its folders `head` and `target`."""
        return self.root / "export"

    @property
    def best(self) -> Path:
        """The folder of the head that decoded with the largest tau in the evaluations so far."""
        return self.root / "best"


def open_workdir(directory: str | Path, record: Mapping[str, Any]) -> Workdir:
    """Open the directory of a new run, or of the same run started earlier.

    This run must hold the directory's `folder_lock`. `record` (JSON-ready, in sections, one of them
    `config`) must match that of the earlier run. A run without a checkpoint starts over. Raises
    InputError if the earlier run was a different one, naming the fields, and if the directory
    cannot be written.
    """
    workdir = Workdir(output_folder("workdir", directory))
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"

    def check() -> None:
        if workdir.steps:
            check_same_run(workdir.config, record, MAY_DIFFER, "decay_steps is steps unless set")
        write_file(workdir.config, text)

    # The others must not look before the first one has, nor write.
    processes.together(lambda: check() if processes.is_first() else None)
    processes.together(lambda: None if processes.is_first() else _check_seen(workdir))
    return workdir


def truncate_metrics(workdir: Workdir, step: int) -> None:
    """Remove the lines of steps after `step`, and an incomplete last line, from metrics.jsonl."""
    if processes.is_first() and workdir.metrics.exists():
        kept = [row for row in read_metrics(workdir) if row["step"] <= step]
        write_file(workdir.metrics, "".join(json.dumps(row) + "\n" for row in kept))


def is_evaluated(workdir: Workdir, step: int) -> bool:
    """Return whether metrics.jsonl has the evaluation of a step."""

    def look() -> bool:
        evaluations = [row for row in read_metrics(workdir) if row["step"] == step]
        return any(name.startswith("eval/") for row in evaluations for name in row)

    return processes.from_first(look() if processes.is_first() else False)


def read_metrics(workdir: Workdir) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl as dicts, up to the first incomplete or damaged one.

    The list is empty without that file. Raises InputError if it cannot be read.
    """
    rows: list[dict[str, Any]] = []
    try:
        with open_regular(workdir.metrics, _RESTORE) as file:
            for line in file:
                with suppress(InputError):
                    if _is_row(row := parse_json(line, str(workdir.metrics))):
                        rows.append(row)
                        continue
                break
    except FileNotFoundError:
        pass
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{workdir.metrics}: cannot be read ({reason}); {_RESTORE}") from None
    return rows


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(type(value) in (int, float) for value in row.values())
    )


def learning_curve(workdir: Workdir) -> list[dict[str, float]]:
    """Return the evaluations of a run in order, each as numbers by name.

    They are the number of tokens trained on, and those computed on held-out data.
    """
    curve, tokens = [], 0.0
    for row in read_metrics(workdir):
        tokens = row.get("train/tokens", tokens)
        found = {
            name.removeprefix("eval/"): round(value, 4)
            for name, value in row.items()
            if name.startswith("eval/")
        }
        if found:
            curve.append({"step": row["step"], "tokens": tokens, **found})
    return curve


def append_metrics(workdir: Workdir, row: Mapping[str, Any]) -> None:
    """Append `row` as a line to metrics.jsonl, without numbers that are not finite.

    Raises InputError if that fails.
    """
    row = {name: value for name, value in row.items() if math.isfinite(value)}
    try:
        with workdir.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise unwritable(workdir.metrics, error) from None


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically; raise InputError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_writes.write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from None


def _check_seen(workdir: Workdir) -> None:
    if not workdir.config.exists():
        raise InputError(
            f"workdir={str(workdir.root)!r}: made by the first process and not seen by this one; "
            "give a directory on a file system that all processes share"
        )


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the InputError for a file or folder of a run that cannot be written."""
    return InputError(
        f"{path}: cannot be written ({error.strerror or error}); free space, then start again"
    )


def check_same_run(
    file: Path, record: Mapping[str, Any], may_differ: Sequence[str], remark: str = ""
) -> None:
    """Raise InputError, naming the fields, unless `file` records the same run.

    `may_differ` are fields of the config, or sections if they end with a dot. `remark` begins with
    the name of a field, and is appended if that field differs.
    """
    remedy = "restore it, or use another workdir"
    earlier = read_json_file(file, remedy)
    if not isinstance(earlier, dict):
        raise InputError(f"{file} is {shown(earlier)}, not the record of a run; {remedy}")
    was, now = dotted(earlier), dotted(parse_json(json.dumps(record), "the run's record"))
    free = tuple(f"config.{name}" for name in may_differ)
    different = [
        name
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
        and not any(
            name == field or (field[-1] == "." and name.startswith(field)) for field in free
        )
    ]
    if not different:
        return
    listed = "; ".join(
        f"{name.removeprefix('config.')}={was.get(name)!r:.60} then, {now.get(name)!r:.60} now"
        for name in different[:_SHOWN]
    )
    if remark and f"config.{remark.split()[0]}" in different:
        listed += f" ({remark})"
    raise InputError(
        f"workdir={str(file.parent)!r}: another run was begun there: {listed}; "
        "use the same command to resume it, or another workdir"
    )
