"""Benchmark specjax on an accelerator, at large models' shapes: rounds, passes, speed-ups.

    python scripts/bench_accelerator.py --out=accelerator.jsonl [--minutes=9]

Measures on the default device, with random weights of Llama's 8B and 70B shapes (as many layers as
fit) and a simulated drafter of a given acceptance; `--size=debug` does the same with a tiny model,
on a CPU in seconds. Each model, batch and context is one row, appended to --out as JSON when it is
measured: the same command continues with the rows that are left, so that it may be stopped at any
time, or by --minutes. What does not fit the device's memory is a row that says so. Tables of all
rows come last. Exit codes: 0; 1 where a row failed; 2 for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# JAX's default leaves a quarter of a GPU's memory unused.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import jax
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from accelerator import decoding
from accelerator.sizes import SIZES, Size
from accelerator.synthetic import random_model
from specjax.cli import command
from specjax.errors import InputError
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Form
from specjax.tuning import costs

_OUT = flags.DEFINE_string("out", "accelerator.jsonl", "File of the rows, appended as measured.")
_SIZE = flags.DEFINE_enum("size", "full", list(SIZES), "What is measured.")
_MODELS = flags.DEFINE_list("models", None, "Models of the size; all if unset.")
_BATCHES = flags.DEFINE_list("batches", None, "Batch sizes of the size; all if unset.")
_CONTEXTS = flags.DEFINE_list("contexts", None, "Contexts of the size; all if unset.")
_MINUTES = flags.DEFINE_float("minutes", None, "Begin no row after so long.", lower_bound=0.0)

MEASURED, NO_FIT, NO_MEMORY, FAILED = "measured", "does not fit", "out of memory", "failed"
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What a row measures."""

    model: str
    layers: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.model}, {self.layers} layers, batch {self.batch}, context {self.context}"


class Rows:
    """The last row of each cell in a file that was measured with these settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.by_cell: dict[Cell, Row] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # What follows the last newline was being written when a call was killed.
        for line in text.split("\n")[:-1]:
            row = json.loads(line)
            if row["settings"] == settings:
                self.by_cell[Cell(**row["cell"])] = row
        if not text.endswith("\n") and text:
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def add(self, cell: Cell, status: str, **values: Any) -> None:
        """Append a row at once."""
        row = {"cell": cell.__dict__, "settings": self.settings, "status": status, **values}
        self.by_cell[cell] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def measured(self) -> Iterator[tuple[Cell, Row]]:
        """The cells with figures."""
        return ((cell, row) for cell, row in self.by_cell.items() if row["status"] == MEASURED)


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    return command.run(run, [])


def run(_: list[str]) -> int:
    """Measure what is left, and print tables; returns the exit code."""
    deadline = math.inf if _MINUTES.value is None else time.monotonic() + 60 * _MINUTES.value
    device, size = jax.local_devices()[0], SIZES[_SIZE.value]
    batches = _chosen(_BATCHES, dict(zip(map(str, size.batches), size.batches, strict=True)))
    contexts = _chosen(_CONTEXTS, dict(zip(map(str, size.contexts), size.contexts, strict=True)))
    models = _chosen(_MODELS, {name: name for name in size.models})
    size = replace(size, batches=batches, contexts=contexts)
    rows = Rows(
        Path(_OUT.value),
        {
            "size": _SIZE.value,
            "device": device.device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
    )
    memory_bytes = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    bandwidth = costs.copy_bandwidth(size.copy_bytes)
    flops = costs.matmul_flops(size.matmul_size, size.dtype)
    print(f"{device.device_kind}: copies {bandwidth:.4g} bytes/s, multiplies {flops:.4g} FLOP/s")
    left = []
    for name in models:
        left += measure_model(name, size, rows, memory_bytes, bandwidth, deadline)
    print_tables(rows, Console(width=None if os.isatty(1) else 140))
    if left:
        print(f"{len(left)} rows are left: the same command continues with {left[0]}")
    return int(any(row["status"] == FAILED for row in rows.by_cell.values()))


def _chosen(flag: flags.FlagHolder, known: dict[str, Any]) -> tuple[Any, ...]:
    """What a list flag names, everything if it is unset."""
    for name in flag.value or ():
        if name not in known:
            raise InputError(f"{flag.name}={name}: use some of {', '.join(known)}")
    return tuple(known[name] for name in flag.value or known)


def measure_model(
    name: str, size: Size, rows: Rows, memory_bytes: float, bandwidth: float, deadline: float
) -> list[Cell]:
    """Add the rows of a model that are not there, cheap ones first; returns those not reached."""
    config = size.models[name]
    if name in size.fewer_layers:
        # Where not even one layer fits, every row says so.
        layers = size.fitting_layers(config, memory_bytes) or config.num_layers
        config = replace(config, num_layers=layers)
    cells = [
        Cell(name, config.num_layers, batch, context)
        for batch in size.batches
        for context in size.contexts
    ]
    final = (MEASURED, NO_FIT, NO_MEMORY)
    left = [cell for cell in cells if rows.by_cell.get(cell, {}).get("status") not in final]
    left.sort(key=lambda cell: (cell.batch * cell.context, cell.batch))
    model = None
    while left and time.monotonic() < deadline:
        cell = left.pop(0)
        widths = _fitting_widths(size, config, cell, memory_bytes)
        if size.num_speculative_tokens + 1 not in widths:
            rows.add(cell, NO_FIT)
            print(f"{cell}: does not fit")
            continue
        print(f"{cell}: compiling and measuring", flush=True)
        begin = time.monotonic()
        try:
            form = Form.of(jax.default_backend(), config)
            model = model or random_model(name, config, size.dtype, form)
            values = decoding.measure(size, model, cell.batch, cell.context, widths)
        # A compiler's or device's error ends its own row, not the run.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            no_memory = "RESOURCE_EXHAUSTED" in str(error)
            if not no_memory:
                traceback.print_exc()
            rows.add(cell, NO_MEMORY if no_memory else FAILED, reason=reason)
            print(f"    {reason}", flush=True)
        else:
            values["bandwidth_utilisation"] = values["bytes"] / values["round_s"] / bandwidth
            spent = time.monotonic() - begin
            rows.add(cell, MEASURED, date=time.strftime("%Y-%m-%d"), spent_s=spent, **values)
            print(f"    {values['round_s']:.3g} s per plain round; {spent:.0f} s", flush=True)
        gc.collect()
    return left


def _fitting_widths(
    size: Size, config: DecoderConfig, cell: Cell, memory_bytes: float
) -> list[int]:
    """The widths whose passes fit the device's memory, that of a full draft included."""
    return [
        width
        for width in sorted({*size.widths, size.num_speculative_tokens + 1})
        if size.needed_bytes(config, cell.batch, cell.context, width) <= memory_bytes
    ]


def print_tables(rows: Rows, console: Console) -> None:
    """Print plain rounds, passes by width, speed-ups, and what has no figures."""
    names = ("row", "ms", "of copy bandwidth", "loop overhead", "tokens/s", "T(N)/T(1)")
    plain = Table(*names, title="A plain round")
    speedups = Table(
        *("row", "acceptance", "tokens per round", "speed-up", "min..max"),
        *("predicted", "measured/predicted", "rows as plain"),
        title="Speed-up with the simulated drafter",
    )
    for cell, row in rows.measured():
        passes = {int(width): seconds for width, seconds in row["passes"].items()}
        plain.add_row(
            str(cell),
            f"{1e3 * row['round_s']:.2f}",
            f"{row['bandwidth_utilisation']:.0%}",
            f"{row['loop_overhead']:.1%}",
            f"{row['tokens_per_second']:.1f}",
            ", ".join(f"{n}: {seconds / passes[1]:.2f}" for n, seconds in passes.items()),
        )
        for speedup in row["speedups"]:
            speedups.add_row(
                str(cell),
                f"{speedup['acceptance']} ({speedup['measured_acceptance']:.2f})",
                f"{speedup['tokens_per_round']:.2f}",
                f"{speedup['speedup']:.2f}x",
                f"{speedup['speedup_min']:.2f}..{speedup['speedup_max']:.2f}",
                f"{speedup['predicted']:.2f}x",
                f"{speedup['measured_over_predicted']:.2f}",
                f"{speedup['same_rows']} of {speedup['rows']}",
            )
    for table in (plain, speedups):
        if table.row_count:
            console.print(table)
    for cell, row in rows.by_cell.items():
        if row["status"] != MEASURED:
            console.print(f"{cell}: {row['status']} {row.get('reason', '')}".rstrip())


if __name__ == "__main__":
    command.use_compilation_cache()
    app.run(main)
