"""Kill runs at random moments, start them again, and compare their results.

    python scripts/kill_and_resume.py [--kills=20] [--what=medusa,mtp,generation] [--seed=0]

The commands are training by each method, generation, and the storing of features, in their debug
sizes. Each runs once undisturbed, for the reference, and once more, to see that two runs give the
same and how long one takes. Then it is killed (SIGKILL, the whole process group) at moments spread
over that time and started again with the same command until it ends; where it ends before all kills
are done, the rest go to a fresh folder. Compared bit by bit: the conversations of datasets with
their features, the arrays and metadata of exports and checkpoints, answers, lines of
metrics without their timings, and the names of all files that a run keeps. Exit codes: 0; 1 where
anything differs or a run fails; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from lib.trainers import METHODS
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.fields import Choice, Whole, dotted
from specjax.files.folder_checksums import LOCK
from specjax.loading.checkpoints import load_drafter
from specjax.loading.storage import orbax_checkpoint
from specjax.loading.storage.checkpoint_directory import ARRAYS, is_checkpoint, read_marker
from train.data.examples import METADATA
from train.data.responses import open_responses
from train.generation.saved_answers import SavedAnswers
from train.run import checkpoints as run_checkpoints
from train.run.workdir import Workdir, read_metrics

ROOT = Path(__file__).parents[1]
WHAT = (*METHODS, "generation", "features")
_USUAL = ("medusa", "mtp", "generation", "features")
_TIMES = ("train/tokens_per_second", "train/seconds_left", "train/data_wait")
_FOLDERS = ("workdir", "output")
"""The fields of a recorded config that name a run's own folder."""
_SHOWN = 5
_SHORTER = 0.8

Content = dict[str, str]
"""The results of a run: a digest or a text for each part, by the part's name and location."""


class Failed(Exception):
    """A run that ended with an error, or differently than expected."""


@dataclass
class Result:
    """The result of one command: its kills, and the differences from the reference."""

    what: str
    seconds: float
    kills: int = 0
    runs: int = 0
    starts: int = 0
    compared: int = 0
    different: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        _run, Flags, argv, program="python scripts/kill_and_resume.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    kills: Annotated[int, Whole()] = 20
    """How often each command is killed."""
    what: Annotated[tuple[str, ...] | str, Listed(Choice(WHAT))] = ",".join(_USUAL)
    """The commands to kill."""
    seed: Annotated[int, Whole()] = 0
    """The seed of the moments."""


def _run(options: Flags) -> int:
    with tempfile.TemporaryDirectory(prefix="kill_and_resume-") as temporary:
        root = Path(temporary)
        answers, log = root / "answers", root / "answers.log"
        try:
            if set(options.what) - {"generation"}:
                _say("generation, for the others to work on")
                _end(_start(command_of("generation", answers, answers), log), log)
            results = []
            for what in options.what:
                start = partial(command_of, what, answers / "responses")
                results.append(kill_and_compare(what, start, root / what, options))
        except Failed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    _report(results)
    return 1 if any(result.different for result in results) else 0


def command_of(what: str, data: Path, folder: Path) -> list[str]:
    """Return the command that works in a folder; all but generation need the dataset `data`."""
    if what == "generation":
        config = "--config=configs/generate_smollm2.py:debug"
        return ["train.generate", config, f"--config.workdir={folder}", "--config.batch_size=2"]
    if what == "features":
        where = [f"--input={data}", f"--output={folder}"]
        return ["train.features", *where, "--part=2", "--tokens=512"]
    trainer = METHODS[what]
    return [
        trainer.module,
        f"--config={trainer.config}:debug",
        f"--config.data={data}",
        f"--config.workdir={folder}",
        "--config.steps=12",
        "--config.checkpoint_every=2",
    ]


def kill_and_compare(
    what: str, command: Callable[[Path], list[str]], root: Path, options: Flags
) -> Result:
    """Kill a command the requested number of times, and compare its results after each run."""
    root.mkdir(parents=True)
    log = root / "log"
    _say(f"{what}: undisturbed, twice")
    for name in ("reference", "second"):
        begin = time.monotonic()
        _end(_start(command(root / name), log), log)
        seconds = time.monotonic() - begin
    reference = contents(what, root / "reference")
    result = Result(what, seconds, compared=len(reference))
    result.different += differences(reference, contents(what, root / "second"))

    moments = spread(options.kills, seconds, random.Random(f"{options.seed} {what}"))
    while True:
        folder = root / f"killed-{result.runs}"
        result.runs += 1
        while moments:
            fresh = not folder.exists()
            result.starts += 1
            process = _start(command(folder), log)
            try:
                code = process.wait(moments[-1])
            except subprocess.TimeoutExpired:
                _kill(process)
                result.kills += 1
                _say(f"{what}: kill {result.kills} after {moments.pop():.2f} s")
                continue
            _check(code, log)
            if fresh:  # a whole run took less time than it did before
                moments[-1] *= _SHORTER
            break
        else:
            result.starts += 1
            _end(_start(command(folder), log), log)
        found = differences(reference, contents(what, folder))
        result.different += [f"run {result.runs}: {one}" for one in found]
        _say(f"{what}: run {result.runs} has ended, {len(found)} differences")
        if not moments:
            return result
        shutil.rmtree(folder)


def spread(count: int, seconds: float, rng: random.Random) -> list[float]:
    """Return `count` moments in random order, one in each equal part of `seconds`."""
    moments = [(index + rng.random()) * seconds / count for index in range(count)]
    rng.shuffle(moments)
    return moments


def contents(what: str, folder: Path) -> Content:
    """Return the results of a finished run in its folder."""
    found = {"generation": _generation, "features": _features}.get(what, _training)(folder)
    found["the names of its files"] = "\n".join(sorted(_names(folder)))
    return found


def differences(reference: Content, other: Content) -> list[str]:
    """Return the names of the parts that are missing, additional or different."""
    return [
        f"{name} is missing"
        if name not in other
        else f"{name} is additional"
        if name not in reference
        else f"{name} differs"
        for name in sorted(reference.keys() | other.keys())
        if reference.get(name) != other.get(name)
    ]


def _names(folder: Path) -> list[str]:
    """Return the names of a run's files, except those made anew at each start or named randomly."""
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        ours = name.parts[0] != "tensorboard" and name.name != LOCK
        orbax = any(part == ARRAYS or part.startswith("step-") for part in name.parts)
        if path.is_file() and ours and not orbax:
            found.append(name.as_posix())
    return found


def _generation(folder: Path) -> Content:
    found = _dataset(folder / "responses")
    for number, tokens in SavedAnswers(folder / "answers.jsonl").read().items():
        found[f"answer {number}"] = _digest(np.array(tokens))
    found["config.json"] = _record(json.loads((folder / "config.json").read_text()))
    return found


def _features(folder: Path) -> Content:
    found: Content = {}
    for part in sorted(folder.glob("part-*")):
        found |= {f"{part.name} {name}": value for name, value in _dataset(part).items()}
    return found


def _dataset(folder: Path) -> Content:
    responses = open_responses(folder)
    found = {METADATA: _record(responses.metadata)}
    for index in range(len(responses)):
        example = vars(responses[index])
        for name, value in {**example, **example["features"]}.items():
            if name != "features":
                text = _digest(value) if isinstance(value, np.ndarray) else repr(value)
                found[f"conversation {index} {name}"] = text
    return found


def _training(folder: Path) -> Content:
    workdir = Workdir(folder)
    found = {"steps of checkpoints": str(workdir.steps)}
    for name in ("export", "export/head", "export/target"):
        if is_checkpoint(folder / name):
            is_model = read_marker(folder / name).kind == "model"
            read = _model if is_model else load_drafter
            found |= _parts(name, *read(folder / name))
    last = run_checkpoints.last_checkpoint(workdir)
    if last is not None:
        found |= _parts("checkpoint", *_restored(last.found))
    for number, row in enumerate(read_metrics(workdir)):
        timeless = {name: value for name, value in row.items() if name not in _TIMES}
        found[f"metrics, line {number + 1}"] = json.dumps(timeless)
    found["config.json"] = _record(json.loads(workdir.config.read_text()))
    return found


def _model(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return _restored(orbax_checkpoint.look(folder, "model"))


def _restored(saved: orbax_checkpoint.Found) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and the metadata of a checkpoint that Orbax wrote."""
    orbax_checkpoint.verify(saved)
    sharding = SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), saved.arrays
    )
    return orbax_checkpoint.restore(saved, wanted), saved.metadata


def _parts(name: str, arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> Content:
    found = {f"{name} {path}": _digest(value) for path, value in dotted(arrays).items()}
    return found | {f"{name}'s metadata": _record(metadata)}


def _digest(array: Any) -> str:
    array = np.ascontiguousarray(array)
    shape = f"{array.dtype}{list(array.shape)}"
    return f"{shape} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _record(metadata: Mapping[str, Any]) -> str:
    """Return metadata as a text, without the run's own folders."""
    flat = {
        name: value
        for name, value in dotted(metadata).items()
        if not (name.split(".")[-1] in _FOLDERS and "config" in name.split("."))
    }
    return json.dumps(flat, sort_keys=True, default=str)


def _start(command: Sequence[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: subprocess.Popen, log: Path) -> None:
    """Wait for a command to end; raise Failed unless its exit code is 0."""
    try:
        _check(process.wait(), log)
    finally:
        _kill(process)


def _check(code: int, log: Path) -> None:
    if code != 0:
        last = " | ".join(log.read_text(errors="replace").splitlines()[-8:])
        raise Failed(f"a command ended with code {code}: {last}")


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _report(results: Sequence[Result]) -> None:
    table = Table()
    for column in ("command", "undisturbed", "kills", "starts", "runs", "compared", "different"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for one in results:
        counts = (one.kills, one.starts, one.runs, one.compared, len(one.different))
        table.add_row(one.what, f"{one.seconds:.1f} s", *map(str, counts))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for one in results:
        for line in one.different[:_SHOWN]:
            console.print(f"{one.what}: {line}", markup=False)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    raise SystemExit(main())
