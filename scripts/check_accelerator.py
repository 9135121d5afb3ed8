"""Check specjax on an accelerator in nine minutes (`make gpu-check`).

    python scripts/check_accelerator.py --out=build/gpu_check [--size=debug] [--stages=kernels]

Stages run in order of importance (`accelerator/stages.py`), each as a process with a time limit:
the attention kernel against float32, decoding of the default model with fixed lengths, `auto` and
trees, an engine with 64 requests, rounds at Llama-8B's shape, weights in 8 bits, compiling,
training, a part of the tests, and transformers' assisted generation beside it. Each prints one line
and adds a line of JSON to OUT/stages.jsonl, with its output in a file beside it; a stage that fails
or takes too long does not stop the next. The same command continues with the stages that have not
passed on this device. `--size=debug` runs on a CPU. Exit codes: 0; 1 if a stage failed; 2 for bad
input; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from accelerator.stages import SCRIPTS, Stage, stages
from specjax.apps.command_line import command
from specjax.errors import InputError

_OUT = flags.DEFINE_string("out", "build/gpu_check", "Folder of the results.")
_SIZE = flags.DEFINE_enum("size", "full", ["full", "debug"], "debug runs on a CPU.")
_STAGES = flags.DEFINE_list("stages", None, "Names of stages; all if unset.")
_MINUTES = flags.DEFINE_float("minutes", 9.0, "Begin no stage after so long.", lower_bound=0.0)

PASSED, FAILED, TOO_LONG = "passed", "failed", "took too long"


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    return command.run(run, [])


def run(_: list[str]) -> int:
    """Run the stages that are left; return the exit code."""
    begin = time.monotonic()
    device = _device(_SIZE.value)
    folder = Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"size": _SIZE.value, "device": device, "jax": jax.__version__}
    chosen = _chosen(stages(_SIZE.value, folder), _STAGES.value)
    results = folder / "stages.jsonl"
    passed = {one["stage"] for one in _read(results, settings) if one["status"] == PASSED}
    print(f"{device}, JAX {jax.__version__}; results in {folder}", flush=True)
    statuses = []
    for stage in chosen:
        if stage.name in passed:
            print(f"{stage.name}: passed before", flush=True)
        elif time.monotonic() - begin > 60 * _MINUTES.value:
            print(f"{stage.name}: left for the next call", flush=True)
        else:
            result = run_stage(stage, folder)
            statuses.append(result["status"])
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**settings, **result}) + "\n")
            print(
                f"{stage.name}: {result['status']} in {result['seconds']:.0f} s: "
                f"{result['summary'] or result['end']}",
                flush=True,
            )
    return int(any(status != PASSED for status in statuses))


def run_stage(stage: Stage, folder: Path) -> dict[str, Any]:
    """Run a stage in a process of its own; return its result."""
    begin = time.monotonic()
    log = folder / f"{stage.name.replace(', ', '_').replace(' ', '_')}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=SCRIPTS.parent,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{SCRIPTS.parent}{os.pathsep}{SCRIPTS}"},
        )
        try:
            status = PASSED if process.wait(stage.seconds) == 0 else FAILED
        except subprocess.TimeoutExpired:
            status = TOO_LONG
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own children, too
            process.wait()
    output = log.read_text(encoding="utf-8", errors="replace")
    return {
        "stage": stage.name,
        "status": status,
        "seconds": round(time.monotonic() - begin, 1),
        "summary": stage.summary(output),
        "end": " ".join(output.split()[-30:]),
    }


def _device(size: str) -> str:
    """Return the name of the accelerator. Raises InputError if there is none."""
    found = jax.devices()[0]
    if found.platform == "cpu" and size == "full":
        raise InputError(
            "no accelerator: JAX finds a CPU only; install specjax[cuda13] or [tpu], or pass "
            "--size=debug"
        )
    return found.device_kind


def _chosen(known: list[Stage], names: list[str] | None) -> list[Stage]:
    by_name = {stage.name.replace(", ", " "): stage for stage in known}
    unknown = set(names or ()) - set(by_name)
    if unknown:
        raise InputError(f"stages={sorted(unknown)[0]!r}: use {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def _read(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results in a file that have these settings, skipping an incomplete last line."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    results = map(json.loads, lines)
    return [one for one in results if settings.items() <= one.items()]


if __name__ == "__main__":
    app.run(lambda argv: sys.exit(main(argv)))
