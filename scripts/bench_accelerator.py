"""Benchmark specjax on an accelerator, at Llama-8B's shape: rounds, passes, speed-ups.

    python scripts/bench_accelerator.py --out=accelerator.jsonl [--minutes=9]

Measures on the default device, with random weights and a simulated drafter of a given acceptance;
`--size=debug` does the same with a tiny model, on a CPU in seconds. Each batch and context is one
row, appended to --out as JSON once it is measured: the same command continues with the rows that
are left, so that it may be stopped at any time, or by --minutes. A row that does not fit the
device's memory says so. Tables of all rows are printed at the end. Exit codes: 0; 1 if a row
failed; 2 for bad input; 130 after Ctrl-C.
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
from specjax.apps.command_line import command
from specjax.apps.tuning import measure_costs
from specjax.errors import InputError
from specjax.models.form import Form

_OUT = flags.DEFINE_string("out", "accelerator.jsonl", "File of the rows, appended as measured.")
_SIZE = flags.DEFINE_enum("size", "8b", list(SIZES), "What is measured.")
_BATCHES = flags.DEFINE_list("batches", None, "Batch sizes of the size; all if unset.")
_CONTEXTS = flags.DEFINE_list("contexts", None, "Contexts of the size; all if unset.")
_MINUTES = flags.DEFINE_float("minutes", None, "Begin no row after so long.", lower_bound=0.0)

MEASURED, NO_MEMORY, FAILED = "measured", "out of memory", "failed"
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """The batch and context that a row measures."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


class Rows:
    """The last row of each cell in a file, among those measured with the same settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.by_cell: dict[Cell, Row] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # What follows the last newline was being written when a call was killed.
        complete, _, cut_off = text.rpartition("\n")
        if cut_off:
            path.write_text(complete + "\n" * bool(complete), encoding="utf-8")
        for row in map(json.loads, complete.splitlines()):
            if row["settings"] == settings:
                self.by_cell[Cell(**row["cell"])] = row

    def add(self, cell: Cell, status: str, **values: Any) -> None:
        """Append a row to the file at once."""
        row = {"cell": cell.__dict__, "settings": self.settings, "status": status, **values}
        self.by_cell[cell] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def measured(self) -> Iterator[tuple[Cell, Row]]:
        """Yield the cells that have figures, each with its row."""
        return ((cell, row) for cell, row in self.by_cell.items() if row["status"] == MEASURED)


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    return command.run(run, [])


def run(_: list[str]) -> int:
    """Measure the rows that are left, and print tables; return the exit code."""
    deadline = math.inf if _MINUTES.value is None else time.monotonic() + 60 * _MINUTES.value
    device, size = jax.local_devices()[0], SIZES[_SIZE.value]
    size = replace(
        size,
        batches=_chosen(_BATCHES, size.batches),
        contexts=_chosen(_CONTEXTS, size.contexts),
    )
    settings = {
        "size": _SIZE.value,
        "device": device.device_kind,
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    rows = Rows(Path(_OUT.value), settings)
    bandwidth = measure_costs.copy_bandwidth(size.copy_bytes)
    flops = measure_costs.matmul_flops(size.matmul_size, size.dtype)
    print(f"{device.device_kind}: copies {bandwidth:.4g} bytes/s, multiplies {flops:.4g} FLOP/s")
    left = measure(size, rows, bandwidth, deadline)
    print_tables(rows, Console(width=None if os.isatty(1) else 140))
    if left:
        print(f"{len(left)} rows are left: the same command continues with {left[0]}")
    return int(any(row["status"] == FAILED for row in rows.by_cell.values()))


def _chosen(flag: flags.FlagHolder, known: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers that a list flag names, or all known ones if it is unset."""
    by_name = {str(number): number for number in known}
    for name in flag.value or ():
        if name not in by_name:
            raise InputError(f"{flag.name}={name}: use some of {', '.join(by_name)}")
    return tuple(by_name[name] for name in flag.value or by_name)


def measure(size: Size, rows: Rows, bandwidth: float, deadline: float) -> list[Cell]:
    """Add the missing rows, cheap ones first; return the cells not reached before the deadline."""
    cells = [Cell(batch, context) for batch in size.batches for context in size.contexts]
    done = {cell for cell, row in rows.by_cell.items() if row["status"] != FAILED}
    left = sorted(set(cells) - done, key=lambda cell: (cell.batch * cell.context, cell.batch))
    model = None
    while left and time.monotonic() < deadline:
        cell = left.pop(0)
        print(f"{cell}: compiling and measuring", flush=True)
        begin = time.monotonic()
        try:
            form = Form.of(jax.default_backend(), size.model)
            model = model or random_model(_SIZE.value, size.model, size.dtype, form)
            values = decoding.measure(size, model, cell.batch, cell.context)
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


def print_tables(rows: Rows, console: Console) -> None:
    """Print tables of plain rounds, passes by width, speed-ups, and cells without figures."""
    plain = Table(
        *("row", "ms", "of copy bandwidth", "loop overhead", "tokens/s", "T(N)/T(1)"),
        title="A plain round",
    )
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
            console.print(f"{cell}: {row['status']}: {row['reason']}")


if __name__ == "__main__":
    command.use_compilation_cache()
    app.run(main)
