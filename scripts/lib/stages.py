"""Commands that are run one after the other, each of them once, by a script that can be resumed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.child_processes import run_child
from specjax.cli import command
from specjax.errors import InputError
from train.run.workdir import write_file


class Stage(NamedTuple):
    """One command of several: a Python module, or a file, that resumes what was interrupted."""

    name: str
    command: list[str]

    @property
    def command_line(self) -> str:
        """The command without the Python that runs it."""
        return " ".join(self.command[2 if self.command[1] == "-m" else 1 :])


def run_stages(
    stages: Sequence[Stage], root: Path, last: str, until: float = math.inf
) -> int | None:
    """Run what is left, as `run_child` does; an exit code where that ends early, else None.

    `root`/finished.json lists what has ended; `last` is what follows all stages. Raises InputError
    where a stage was done with another command.
    """
    record = root / "finished.json"
    finished = _read(record)
    for stage in stages:
        earlier = finished.get(stage.name, {}).get("command", stage.command_line)
        if earlier != stage.command_line:
            raise InputError(
                f"workdir={str(root)!r}: {stage.name} was done there with another command, "
                f"{earlier!r} for {stage.command_line!r}; use that one, or another workdir"
            )
    for folder, stage in enumerate(stages):
        if stage.name in finished:
            print(f"[{stage.name}] done earlier, {finished[stage.name]['seconds']:.0f} s")
            continue
        print(f"[{stage.name}] {stage.command_line}", flush=True)
        begin = time.monotonic()
        try:
            code = run_child(stage.command, until=until) if begin < until else None
        except KeyboardInterrupt:
            code = command.INTERRUPTED
        if code != 0:
            return _ended(code, [*(one.name for one in stages[folder:]), last])
        finished[stage.name] = {"command": stage.command_line, "seconds": time.monotonic() - begin}
        write_file(record, json.dumps(finished, indent=1) + "\n")
    return None


def _ended(code: int | None, names: Sequence[str]) -> int:
    """Print what is left, the interrupted stage first; returns the exit code."""
    left = f"left: {', '.join(names)}. The same command resumes it"
    if code is None:
        print(f"the minutes are over; {left}")
        return 0
    if code == command.INTERRUPTED:
        print(f"interrupted; {left}", file=sys.stderr)
        return code
    print(f"[{names[0]}] ended with code {code}; {left}", file=sys.stderr)
    return 1


def _read(record: Path) -> dict[str, Any]:
    """The finished stages, with their commands and seconds."""
    try:
        text = record.read_text(encoding="utf-8") if record.exists() else "{}"
        return {
            name: {"command": str(about["command"]), "seconds": float(about["seconds"])}
            for name, about in json.loads(text).items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise InputError(
            f"{record}: cannot be read; delete it, and each stage finds what it has done"
        ) from None
