"""Measure the parts of a round, and compare measured with predicted speed-up.

    python -m specjax.bench --config=configs/bench_smollm2.py

Pass times are medians of several warm runs, without compilation. Speed-ups compare with plain
decoding in the same loop, in alternating runs, and are given as geometric means with 95 %
confidence intervals. The report, a file of JSON lines, grows as results are measured: one entry for
all drafters at each draft length, batch size and temperature, then a final summary.

Exit codes: 0; 2 for bad input or a report that cannot be written; 130 after Ctrl-C, SIGTERM or a
closed terminal; 141 if stdout is closed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.mesh_config import open_mesh
from specjax.apps.rows.report_file import ReportFile, check_together
from specjax.apps.run.bench_config import BenchConfig
from specjax.apps.run.bench_run import measure_all
from specjax.distributed import processes, sharding
from specjax.fields import read_values


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""

    def run(config: BenchConfig, *, verbose: bool) -> int:
        mesh = open_mesh(config.mesh, config.distributed, asdict(config))
        report = ReportFile(check_together(config.report))
        width = None if sys.stdout.isatty() else 120
        console = Console(width=width, quiet=not processes.is_first(), markup=False)
        with sharding.use(mesh):
            measure_all(config, console, mesh, report, verbose=verbose)
        report.finish([{"record": "summary"}])
        return 0

    return command.run_config(
        run,
        argv,
        default="bench_smollm2",
        read=functools.partial(read_values, BenchConfig),
        documentation=__doc__,
        source=BenchConfig,
        flags={"verbose": "also show what controllers drafted, prefill, and predictions"},
    )


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
