"""Train drafters on an accelerator in calls of a few minutes, each perhaps on a new machine.

    python scripts/train_accelerator.py --out=OUT1
    python scripts/train_accelerator.py --out=OUT2 --input=OUT1

A call runs the stages of `scripts/reproduce_heads.py` in the folder --work: the target answers
prompts, each drafter is trained. Features of the target are computed in each step, since stored
ones are too large to carry. After nine tenths of --minutes a call stops the running command, which
saves, and packs what the next call needs into OUT, in parts of at most --part_mb megabytes: answers
and the checkpoint that is being trained. The next call's --input is that folder, or a part of its
files at a time; where --work is still there, it continues from --work. Heads that a call finishes
are in its OUT, and OUT/report.txt says what was done and what is next. Flags that say what is made
must stay the same. `--size=debug` runs on a CPU. Exit codes: 0; 1 if a stage or an export failed; 2
for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerator import parts
from lib.child_processes import run_child
from lib.recipe import Stage, export_head, stages
from lib.trainers import TRAINERS
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import (
    Choice,
    Flag,
    InputFolder,
    Number,
    OutputFolder,
    Text,
    Whole,
    optional,
)
from specjax.files import atomic_writes
from specjax.files.folder_checksums import MARKER
from specjax.files.json_files import read_json_file
from train.generation.saved_answers import SavedAnswers
from train.run.workdir import STEPS, Workdir

ROOT = Path(__file__).parents[1]
_CALL, _DATA, _HEADS = Path("call.json"), Path("data"), Path("heads")
_BEFORE_STOP = 0.9
"""The fraction of a call after which the running command is asked to stop."""
_LEAST = 0.05
"""The smallest fraction of a call for which a command is started."""
_GRACE, _LEAST_GRACE_S = 0.05, 20.0
"""The fraction of a call in which a command must end once it is asked to, and the fewest seconds.
"""
_LASTING = ("size", "generate", "questions", "generate_options", "train_options")
"""The flags that all calls must share."""
_OWN_FIELDS = re.compile(r"--config\.(minutes|workdir|output|data|prompts)\b")
"""Fields of the commands that this script sets, or that would end a stage before it is finished."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        call,
        Flags,
        argv,
        program="python scripts/train_accelerator.py",
        documentation=__doc__,
        interrupted="interrupted; OUT has what the next call needs",
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    out: Annotated[Path, OutputFolder()]
    """A new folder for what this call brings back."""
    input: Annotated[Path | None, optional(InputFolder())] = None
    """The folder that the last call wrote."""
    work: Annotated[Path, OutputFolder()] = "build/train_accelerator"
    """Where the stages work."""
    minutes: Annotated[float, Number(0.0, 1e6, above=True)] = 9.0
    """The length of the call in minutes."""
    kinds: Annotated[tuple[str, ...] | str, Listed(Choice(tuple(TRAINERS)))] = "eagle3"
    """Drafters to train."""
    size: Annotated[str | None, optional(Choice(("debug",)))] = None
    """The size of the run: debug, or by default the real thing."""
    responses: Annotated[tuple[str, ...] | str, Listed(InputFolder(), empty=True)] = ""
    """Datasets of answers that exist already, for the first call."""
    generate: Annotated[bool, Flag()] = True
    """Let the target answer prompts."""
    questions: Annotated[bool, Flag()] = True
    """Let it answer questions that it asks itself, too."""
    generate_options: Annotated[str, Text(empty=True)] = ""
    """More fields for train.generate, as '--config.batch_size=16'."""
    train_options: Annotated[str, Text(empty=True)] = ""
    """More fields for the trainers, as '--config.batch_size=16'."""
    part_mb: Annotated[int, Whole(1, 10**6)] = 15
    """The maximum size of a file in OUT, in megabytes."""
    carry_mb: Annotated[int, Whole(1, 10**6)] = 60
    """The maximum size of an input, in megabytes."""


def call(options: Flags) -> int:
    """Make one call; return the exit code. Raises InputError."""
    begin = time.monotonic()
    out, work = options.out, options.work
    if out.exists() and any(out.iterdir()):
        raise InputError(f"out={str(out)!r}: holds files already; name a new folder")
    begun = options.input or (work / _CALL).exists()
    if not (begun or options.generate or options.responses):
        raise InputError("responses is missing: --nogenerate needs --responses=DIRECTORY")
    if begun and options.responses:
        raise InputError("responses: only the first call reads them; leave --responses out")
    for flag in ("generate_options", "train_options"):
        if found := _OWN_FIELDS.search(getattr(options, flag)):
            raise InputError(f"{flag}: {found[0]} is set by this script; leave it out")
    with folder_lock.lock(work, "recipe", f"work={str(work)!r}"):
        if not _continued(options):
            return 0
        record = _read_call(work)
        for flag, value in record["flags"].items():
            if getattr(options, flag) != value:
                raise InputError(
                    f"{flag}={getattr(options, flag)!r}: earlier calls had {value!r}; repeat that, "
                    "or name another --work"
                )
        number, done = record["calls"], record["done"]
        found = _stages(options)
        _say(out, f"call {number + 1}, {options.minutes:g} minutes")
        try:
            code = _run(options, found, record, begin)
        finally:  # after Ctrl-C too
            _pack_state(options, found, {**record, "calls": number + 1})
        return code or _pack_heads(options, done)


def _say(out: Path, line: str) -> None:
    """Print a line, and add it to OUT/report.txt."""
    print(line, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "report.txt").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _continued(options: Flags) -> bool:
    """Bring the work folder to where the last call ended; return False if parts are missing.

    Raises InputError if the folder is of an earlier call than the input.
    """
    out, work, started = options.out, options.work, (options.work / _CALL).exists()
    last = parts.read_list(options.input)[0] if options.input else 0
    if started and last > _read_call(work)["calls"]:
        raise InputError(
            f"input={str(options.input)!r}: of call {last}, and work={str(work)!r} of an earlier "
            "one; delete that folder, or name another"
        )
    if options.input and not started:
        if missing := parts.unpack(options.input, work):
            _say(out, f"kept; calls on this machine must still bring {', '.join(missing)}")
            return False
    elif not started:
        for number, source in enumerate(options.responses):
            shutil.copytree(source, work / _DATA / str(number), dirs_exist_ok=True)
        flags = {flag: getattr(options, flag) for flag in _LASTING}
        _write_call(work, {"calls": 0, "done": [], "flags": flags})
    return True


def _read_call(work: Path) -> dict[str, Any]:
    """Return the number of finished `calls`, the names of finished stages (`done`), and `flags`."""
    return read_json_file(work / _CALL, "delete the folder")


def _write_call(work: Path, record: dict[str, Any]) -> None:
    atomic_writes.write_text(work / _CALL, json.dumps(record) + "\n")


def _stages(options: Flags) -> list[Stage]:
    """Return the stages, with folders relative to the work folder: the same on every machine."""
    count = len(list((options.work / _DATA).glob("*")))
    found = stages(
        Path(),
        options.kinds,
        [str(_DATA / str(number)) for number in range(count)],
        size=options.size,
        generate=options.generate,
        questions=options.questions,
        store_features=False,
    )
    more = {"train.generate": options.generate_options}
    return [
        stage._replace(
            command=stage.command + shlex.split(more.get(stage.command[0], options.train_options))
        )
        for stage in found
    ]


def _run(options: Flags, found: Sequence[Stage], record: dict[str, Any], begin: float) -> int:
    """Run unfinished stages until the time is over, and note them; return the exit code."""
    out, work, seconds = options.out, options.work, 60 * options.minutes
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for stage in found:
        if str(stage.folder) in record["done"]:
            continue
        left = begin + _BEFORE_STOP * seconds - time.monotonic()
        if left <= _LEAST * seconds:
            break
        start = time.monotonic()
        code = run_child(
            [sys.executable, "-m", *stage.command],
            seconds=left,
            grace_s=max(_GRACE * seconds, _LEAST_GRACE_S),
            folder=work,
            env={**os.environ, "PYTHONPATH": path},
        )
        spent = time.monotonic() - start
        if not code:
            record["done"].append(str(stage.folder))
            _write_call(work, record)
            _say(out, f"{stage.folder}: finished, {spent:.0f} s in this call")
        elif spent >= left:
            _say(out, f"{stage.folder}: stopped after {spent:.0f} s, {_progress(stage, work)}")
            break
        else:
            _say(out, f"{stage.folder}: {stage.command[0]} failed with code {code}")
            return 1
    return 0


def _progress(stage: Stage, work: Path) -> str:
    """Return how far an unfinished stage is."""
    if stage.command[0] == "train.generate":
        files = sorted((work / stage.folder).rglob("answers.jsonl"))
        counts = {file.parent.name: len(SavedAnswers(file).read()) for file in files}
        return ", ".join(f"{name}: {count} saved" for name, count in counts.items()) or "none saved"
    steps = Workdir(work / stage.folder).steps
    return f"step {steps[-1]} saved" if steps else "nothing saved that is carried"


def _pack_state(options: Flags, found: Sequence[Stage], record: dict[str, Any]) -> None:
    """Pack what the next call needs; say what that is."""
    work, out, done = options.work, options.out, record["done"]
    _write_call(work, record)
    left = [str(stage.folder) for stage in found if str(stage.folder) not in done]
    if not left:
        _say(out, "all stages are finished: no further call is needed")
        return
    names = [path for stage in found for path in _carried(stage, done, work)]
    given = [_DATA] if (work / _DATA).exists() else []
    # The call's number last: without it the work folder counts as not begun.
    state = parts.pack(work, [*given, *names, _CALL], out, "state", options.part_mb * 10**6)
    parts.write_list(state, out, record["calls"])
    size = sum(path.stat().st_size for path in state) / 1e6
    _say(out, f"next: --input={out} ({size:.1f} MB) and a new --out; left: {', '.join(left)}")
    batches = parts.groups(state, options.carry_mb * 10**6)
    for batch in batches if len(batches) > 1 else []:
        listed = ", ".join(path.name for path in batch)
        _say(out, f"  more than --carry_mb: a call on the same machine with {parts.LIST}, {listed}")


def _pack_heads(options: Flags, done: Sequence[str]) -> int:
    """Pack the finished heads that are on this machine; return 1 if one cannot be exported."""
    work, out, code = options.work, options.out, 0
    for kind in options.kinds:
        trained, head = work / kind / "export", work / _HEADS / kind
        try:
            if kind in done and trained.exists() and not head.exists():
                export_head(work / kind, head)
        except InputError as error:
            _say(out, f"{kind}: {error}")
            code = 1
        if head.exists():
            parts.pack(work, [_HEADS / kind], out, kind, options.part_mb * 10**6)
            _say(out, f"{kind}: cat {out}/{kind}.tar.gz.* | tar xz gives {_HEADS / kind}")
        elif kind in done:
            _say(out, f"{kind}: its head is in the OUT of the call that finished it")
    return code


def _carried(stage: Stage, done: Sequence[str], work: Path) -> list[Path]:
    """Return the files and folders of a stage, relative to `work`, that later stages need."""
    is_done = str(stage.folder) in done
    if stage.command[0] == "train.generate":
        found = [stage.result if is_done else stage.folder]
    else:
        run = Workdir(stage.folder)
        last = [STEPS.path(run.checkpoints, step) for step in Workdir(work / run.root).steps[-1:]]
        found = [run.root / MARKER, run.config, run.metrics, run.best, *last] * (not is_done)
    return [path for path in found if (work / path).exists()]


if __name__ == "__main__":
    raise SystemExit(main())
