"""The shipped drafters, from the target to the exports: `python scripts/reproduce_heads.py`.

    python scripts/reproduce_heads.py --workdir=W [--minutes=M] [--responses=DIR,...] [--install]

Stages: the target answers prompts, its features are stored, the EAGLE-3 head, the draft model and
the Medusa heads are trained, and their parameters written in half precision to W/heads. Each stage
goes on where it was stopped, so that the same command continues; when the minutes are over, the one
under way is stopped cleanly and what is left is listed. `--responses` adds datasets of answers that
exist already, `--nogenerate` uses those alone. `--install` puts the heads where specjax looks for
those it ships. `--size=debug` runs everything in minutes. Works alike on CPU and GPU.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

_WORKDIR = flags.DEFINE_string("workdir", "runs/heads", "Where all stages keep their files.")
_MINUTES = flags.DEFINE_float("minutes", None, "Stop cleanly after so long.", lower_bound=0.1)
_RESPONSES = flags.DEFINE_list("responses", [], "Datasets of answers that exist already.")
_GENERATE = flags.DEFINE_bool("generate", True, "Let the target answer prompts.")
_STORE = flags.DEFINE_bool("store_features", True, "Store features; else each step computes them.")
_KINDS = flags.DEFINE_list("kinds", ["eagle3", "draft_model", "medusa"], "Drafters to train.")
_SIZE = flags.DEFINE_string("size", "", "debug, or nothing for the real thing.")
_INSTALL = flags.DEFINE_bool("install", False, "Put the heads where specjax looks for them.")

TRAINERS = {
    "eagle3": ("train.eagle", "configs/train_eagle3.py"),
    "draft_model": ("train.distill", "configs/train_distill.py"),
    "medusa": ("train.medusa", "configs/train_medusa.py"),
    "eagle": ("train.eagle", "configs/train_eagle1.py"),
}
_GRACE_S = 120.0
"""How long a stage has to save what it has."""


class Stage(NamedTuple):
    """A step of the recipe: a command that continues where it was stopped."""

    name: str
    command: list[str]

    @property
    def told(self) -> str:
        """The command without the Python that runs it."""
        return " ".join(self.command[2:])


def main(argv: list[str]) -> None:
    """Run what is left of the recipe."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is not understood")
    if unknown := sorted(set(_KINDS.value) - set(TRAINERS)):
        raise app.UsageError(f"--kinds={unknown[0]}: use {', '.join(TRAINERS)}")
    if not _GENERATE.value and not _RESPONSES.value:
        raise app.UsageError("--nogenerate needs --responses=DIRECTORY")
    root = Path(_WORKDIR.value).expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    record = root / "finished.json"
    finished: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    deadline = None if _MINUTES.value is None else time.monotonic() + 60 * _MINUTES.value
    stages = _stages(root)
    for stage in stages:
        earlier = finished.get(stage.name, {}).get("command", stage.told)
        if earlier != stage.told:
            raise SystemExit(
                f"error: workdir={str(root)!r}: {stage.name} was done there with another command, "
                f"{earlier!r} for {stage.told!r}; use that one, or another workdir"
            )
    for place, stage in enumerate(stages):
        if stage.name in finished:
            seconds = finished[stage.name]["seconds"]
            print(f"[{stage.name}] done earlier, {seconds:.0f} s", flush=True)
            continue
        print(f"[{stage.name}] {stage.told}", flush=True)
        begin = time.monotonic()
        if not _run(stage, deadline):
            left = ", ".join(one.name for one in stages[place:])
            print(f"the minutes are over; left: {left}, export. The same command goes on")
            return
        finished[stage.name] = {"command": stage.told, "seconds": time.monotonic() - begin}
        _write(record, finished)
    _export(root)


def _stages(root: Path) -> list[Stage]:
    python, size = [sys.executable, "-m"], f":{_SIZE.value}" if _SIZE.value else ""
    stages, answers = [], list(_RESPONSES.value)
    if _GENERATE.value:
        output = root / "responses"
        config = f"--config=configs/generate_smollm2.py{size}"
        places = [f"--config.workdir={root / 'generate'}", f"--config.output={output}"]
        stages.append(Stage("generate", [*python, "train.generate", config, *places]))
        answers.append(str(output))
    data = answers
    if _STORE.value:
        data = []
        for number, source in enumerate(answers):
            output = root / "features" / str(number)
            command = [*python, "train.features", f"--input={source}", f"--output={output}"]
            stages.append(Stage(f"features {number}", command))
            data.append(str(output))
    for kind in _KINDS.value:
        module, config = TRAINERS[kind]
        command = [
            *python,
            module,
            f"--config={config}{size}",
            f"--config.data={','.join(data)}",
            f"--config.workdir={root / kind}",
        ]
        stages.append(Stage(kind, command))
    return stages


def _run(stage: Stage, deadline: float | None) -> bool:
    """Whether the stage came to its end; at the deadline it is asked to stop."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        return False
    process = subprocess.Popen(stage.command)
    try:
        code = process.wait(left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False
    if code:
        raise SystemExit(f"[{stage.name}] ended with code {code}; the same command goes on")
    return True


def _export(root: Path) -> None:
    """Each head in half precision, and what they weigh together."""
    import jax
    import numpy as np

    from specjax.heads.files import SHIPPED
    from specjax.heads.head import read_head, save_head

    total = 0
    for kind in _KINDS.value:
        head = read_head(root / kind / "export")
        half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), head.params)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(half)):
            raise SystemExit(f"{kind}: a parameter does not fit in half precision")
        head = dataclasses.replace(head, params=half)
        place = root / "heads" / kind
        save_head(head, place, overwrite=True)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        total += size
        print(f"{place}: {size / 1e6:.1f} MB")
        if _INSTALL.value:
            shipped = SHIPPED / head.target.name / kind
            shutil.rmtree(shipped, ignore_errors=True)
            shutil.copytree(place, shipped)
            print(f"installed: {shipped}")
    print(f"together {total / 1e6:.1f} MB")


def _write(path: Path, content: Any) -> None:
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    app.run(main)
