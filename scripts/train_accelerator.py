"""Train drafters on an accelerator in calls of a few minutes, each perhaps on a new machine.

    python scripts/train_accelerator.py --out=OUT1
    python scripts/train_accelerator.py --out=OUT2 --input=OUT1

A call runs the stages of `scripts/reproduce_heads.py` in the folder --work: the target answers
prompts, its features are stored (with --store_features), each drafter is trained. After nine tenths
of --minutes it stops the running command, which saves, and packs what the next call needs into OUT,
in parts of at most --part_mb megabytes: answers, the checkpoint that is being trained, no features.
The next call's --input is that folder, or a part of its files at a time; where --work is still
there, it continues from --work. Finished heads are packed as well, and OUT/report.txt says what was
done and what is next. Other flags must stay the same. `--size=debug` runs on a CPU. Exit codes: 0;
1 if a stage failed; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from accelerator import parts
from lib.child_processes import run_child
from lib.recipe import Stage, export_head, stages
from lib.trainers import TRAINERS
from specjax.cli import command
from specjax.cli.flags import Listed, Parser
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
_BEFORE_STOP, _LEAST, _GRACE, _LEAST_GRACE_S = 0.9, 0.05, 0.05, 20.0
"""The fraction of a call after which the running command is asked to stop; that for which it is
worth starting one; and that in which a command must then end, at least so many seconds.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    act = lambda arguments: call(SimpleNamespace(**parser().read(arguments)))  # noqa: E731
    return command.run(act, argv, interrupted="interrupted; OUT has what the next call needs")


def parser() -> Parser:
    """Return the parser of the command's flags."""
    flags = Parser("python scripts/train_accelerator.py", __doc__)
    add = flags.add_field
    add("out", OutputFolder(), "a new folder for what this call brings back")
    add("input", optional(InputFolder()), "the folder that the last call wrote", default=None)
    add("work", OutputFolder(), "where the stages work", default="build/train_accelerator")
    add("minutes", Number(0.0, 1e6, above=True), "length of the call", default=9.0)
    add("kinds", Listed(Choice(tuple(TRAINERS))), "drafters to train", default="eagle3")
    add("size", optional(Choice(("debug",))), "debug, or else the real thing", default=None)
    answers = "datasets of answers that exist already, for the first call"
    add("responses", Listed(InputFolder(), empty=True), answers, default="")
    add("generate", Flag(), "let the target answer prompts", default=True)
    add("questions", Flag(), "let it answer questions that it asks itself, too", default=True)
    add("store_features", Flag(), "store the target's features in each call", default=False)
    fields = "more fields for {}, as '--config.batch_size=16'"
    add("generate_options", Text(empty=True), fields.format("train.generate"), default="")
    add("train_options", Text(empty=True), fields.format("the trainers"), default="")
    add("part_mb", Whole(1, 10**6), "most megabytes of a file in OUT", default=15)
    add("carry_mb", Whole(1, 10**6), "most megabytes of an input", default=60)
    return flags


def call(options: SimpleNamespace) -> int:
    """Make one call; return the exit code. Raises InputError."""
    begin = time.monotonic()
    out, work = options.out, options.work
    if out.exists() and any(out.iterdir()):
        raise InputError(f"out={str(out)!r}: holds files already; name a new folder")
    begun = options.input or (work / _CALL).exists()
    if not (begun or options.generate or options.responses):
        raise InputError("responses is missing: --nogenerate needs --responses=DIRECTORY")
    with folder_lock.lock(work, "recipe", f"work={str(work)!r}"):
        if not _continued(options):
            return 0
        number, done = _read_call(work)
        found = _stages(options)
        _say(out, f"call {number + 1}, {options.minutes:g} minutes")
        try:
            return _run(options, found, done, begin)
        finally:  # after Ctrl-C too
            _pack(options, found, number + 1)


def _say(out: Path, line: str) -> None:
    """Print a line, and add it to OUT/report.txt."""
    print(line, flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "report.txt").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _continued(options: SimpleNamespace) -> bool:
    """Bring the work folder to where the last call ended; return False if parts are missing.

    Raises InputError if the folder is of an earlier call than the input.
    """
    out, work, started = options.out, options.work, (options.work / _CALL).exists()
    last = parts.read_list(options.input)[0] if options.input else 0
    if started and last > _read_call(work)[0]:
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
        _write_call(work, 0, [])
    return True


def _read_call(work: Path) -> tuple[int, list[str]]:
    """Return the number of finished calls, and the names of finished stages."""
    content = read_json_file(work / _CALL, "delete the folder")
    return content["calls"], content["done"]


def _write_call(work: Path, calls: int, done: Sequence[str]) -> None:
    atomic_writes.write_text(work / _CALL, json.dumps({"calls": calls, "done": list(done)}) + "\n")


def _stages(options: SimpleNamespace) -> list[Stage]:
    """Return the stages, with folders relative to the work folder: the same on every machine."""
    count = len(list((options.work / _DATA).glob("*")))
    found = stages(
        Path(),
        options.kinds,
        [str(_DATA / str(number)) for number in range(count)],
        size=options.size,
        generate=options.generate,
        questions=options.questions,
        store_features=options.store_features,
    )
    more = {"train.generate": options.generate_options, "train.features": ""}
    return [
        stage._replace(
            command=stage.command + shlex.split(more.get(stage.command[0], options.train_options))
        )
        for stage in found
    ]


def _is_done(stage: Stage, done: Sequence[str], work: Path) -> bool:
    """Return whether a stage is finished; features are where they were stored only."""
    there = stage.command[0] != "train.features" or (work / stage.result).exists()
    return str(stage.folder) in done and there


def _run(options: SimpleNamespace, found: Sequence[Stage], done: list[str], begin: float) -> int:
    """Run unfinished stages until the time is over; return the exit code."""
    out, work, seconds = options.out, options.work, 60 * options.minutes
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for stage in found:
        if _is_done(stage, done, work):
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
            done.append(str(stage.folder))
            _write_call(work, _read_call(work)[0], done)
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


def _pack(options: SimpleNamespace, found: Sequence[Stage], number: int) -> None:
    """Pack finished heads, and what the next call needs; say what that is."""
    work, out, most = options.work, options.out, options.part_mb * 10**6
    _, done = _read_call(work)
    for kind in options.kinds:
        trained, head = work / kind / "export", work / _HEADS / kind
        if kind in done and trained.exists() and not head.exists():
            export_head(work / kind, head)
        if head.exists():
            parts.pack(work, [_HEADS / kind], out, kind, most)
            _say(out, f"{kind}: cat {out}/{kind}.tar.gz.* | tar xz gives {_HEADS / kind}")
    _write_call(work, number, done)
    left = [str(stage.folder) for stage in found if not _is_done(stage, done, work)]
    if not left:
        _say(out, "all stages are finished: no further call is needed")
        return
    names = [path for stage in found for path in _carried(stage, done, work)]
    given = [_DATA] if (work / _DATA).exists() else []
    # The call's number last: without it the work folder counts as not begun.
    state = parts.pack(work, [*given, *names, _CALL], out, "state", most)
    parts.write_list(state, out, number)
    size = sum(path.stat().st_size for path in state) / 1e6
    _say(out, f"next: --input={out} ({size:.1f} MB) and a new --out; left: {', '.join(left)}")
    batches = parts.groups(state, options.carry_mb * 10**6)
    for batch in batches if len(batches) > 1 else []:
        listed = ", ".join(path.name for path in batch)
        _say(out, f"  more than --carry_mb: a call on the same machine with {parts.LIST}, {listed}")


def _carried(stage: Stage, done: Sequence[str], work: Path) -> list[Path]:
    """Return the files and folders of a stage, relative to `work`, that later stages need."""
    is_done = str(stage.folder) in done
    if stage.command[0] == "train.features":
        return []
    if stage.command[0] == "train.generate":
        found = [stage.result if is_done else stage.folder]
    else:
        run = Workdir(stage.folder)
        last = [STEPS.path(run.checkpoints, step) for step in Workdir(work / run.root).steps[-1:]]
        found = [run.root / MARKER, run.config, run.metrics, run.best, *last] * (not is_done)
    return [path for path in found if (work / path).exists()]


if __name__ == "__main__":
    raise SystemExit(main())
