"""Benchmark specjax on an accelerator, at large models' shapes: rounds, speed-ups, kernels.

    python scripts/bench_accelerator.py --out=accelerator.jsonl --pictures=pictures [--minutes=9]

One call measures everything on the default device, with random weights of Llama's 8B and 70B
shapes; `--size=debug` does the same with a tiny model, on a CPU in seconds. Rows are appended to
--out as they are measured, one JSON object per line: a second call with the same settings measures
what is left, so a run may be stopped by --minutes or at any other time. A cell that does not fit
the device's memory becomes a row that says so. Delete rows, or give a --label, to measure again.

transformers with a static cache runs afterwards in a process of its own, with the Python of
--peer_python. Tables and pictures come last, over all rows there are.
"""

from __future__ import annotations

import concurrent.futures.process
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from rich.console import Console

from accelerator import bench, peers, pictures, report
from accelerator.jobs import FORMS
from accelerator.rows import FAILED, Rows
from accelerator.sizes import SIZES
from specjax.errors import InputError
from specjax.reporting.plots import require_matplotlib

KINDS = ("plain", "width", "speedup", "form", "attention", "transformers")

_OUT = flags.DEFINE_string("out", "accelerator.jsonl", "Rows, appended as measured.")
_PICTURES = flags.DEFINE_string("pictures", None, "Folder for the pictures; none if unset.")
_SIZE = flags.DEFINE_enum("size", "full", list(SIZES), "What is measured.")
_MODELS = flags.DEFINE_list("models", None, "Models of the size to measure; all if unset.")
_KINDS = flags.DEFINE_list("kinds", None, f"Of {', '.join(KINDS)}; all if unset.")
_MINUTES = flags.DEFINE_float("minutes", None, "Stop between cells after this many minutes.")
_MEMORY = flags.DEFINE_float(
    "memory_gib", None, "Device memory to count on; what the backend says if unset."
)
_LABEL = flags.DEFINE_string("label", "", "Names this measurement: rows of others do not count.")
_FORM = flags.DEFINE_enum(
    "form", None, list(FORMS), "Layout of layers and cache attention; the backend's if unset."
)
_BATCHES = flags.DEFINE_list("batches", None, "Batch sizes of the size; all if unset.")
_CONTEXTS = flags.DEFINE_list("contexts", None, "Contexts of the size; all if unset.")
_RETRY = flags.DEFINE_bool("retry_failed", False, "Try cells again that failed before.")
_PEER = flags.DEFINE_string("peer_python", ".venv-peers/bin/python", "Python with transformers.")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    try:
        options = _options()
        if _PICTURES.value is not None:
            require_matplotlib()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # torch needs the memory that JAX would keep, so JAX gets a process that ends first.
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            result = pool.submit(bench.measure, options).result()
    except concurrent.futures.process.BrokenProcessPool:
        print(
            f"error: the measuring process died; what it measured is in {options.out}: leave out "
            "its last cell (--kinds, --form, ...), or run the same command again",
            file=sys.stderr,
        )
        return 1
    rows = Rows(options.out, result.settings)
    size = SIZES[options.size]
    left = list(result.left)
    if "transformers" in options.kinds:
        left += peers.compare(options, size, result, rows, _PEER.value)
    console = Console(width=None if sys.stdout.isatty() else 140)
    report.print_summary(rows, size, console)
    if _PICTURES.value is not None:
        for path in pictures.draw(rows, size, Path(_PICTURES.value)):
            print(f"wrote {path}")
    if left:
        print(f"{len(left)} cells are left, the next is {left[0]}: run the same command again")
    failed = [name for row, name in rows.without_figures() if row["status"] == FAILED]
    if failed:
        print(f"{len(failed)} cells failed: --retry_failed tries them again", file=sys.stderr)
    return 1 if failed else 0


def _options() -> bench.Options:
    size = SIZES[_SIZE.value]
    models = _chosen(_MODELS, tuple(size.models))
    kinds = _chosen(_KINDS, KINDS)
    batches = _chosen(_BATCHES, tuple(map(str, size.batches)))
    contexts = _chosen(_CONTEXTS, tuple(map(str, size.contexts)))
    for flag in (_MINUTES, _MEMORY):
        if flag.value is not None and not 0 < flag.value < math.inf:
            raise InputError(f"{flag.name}={flag.value}: use a number above 0")
    minutes = math.inf if _MINUTES.value is None else _MINUTES.value
    return bench.Options(
        out=Path(_OUT.value),
        size=_SIZE.value,
        models=models,
        kinds=kinds,
        batches=tuple(map(int, batches)),
        contexts=tuple(map(int, contexts)),
        retry_failed=_RETRY.value,
        deadline=time.time() + 60 * minutes,
        memory_bytes=None if _MEMORY.value is None else int(_MEMORY.value * 2**30),
        label=_LABEL.value,
        form=_FORM.value,
    )


def _chosen(flag: flags.FlagHolder, known: tuple[str, ...]) -> tuple[str, ...]:
    """A list flag's values, all that there are if unset."""
    for value in flag.value or ():
        if value not in known:
            raise InputError(f"{flag.name}={value}: use some of {', '.join(known)}")
    return tuple(flag.value or known)


if __name__ == "__main__":
    app.run(main)
