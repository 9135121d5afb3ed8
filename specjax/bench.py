"""Measure the parts of a round, and the speed-up over plain decoding next to its prediction.

    python -m specjax.bench --config=configs/bench_smollm2.py

Times of passes are medians of several warm runs, without compiling. Speed-ups are over plain
decoding in the same loop, with alternating runs: geometric means with their 95 % intervals. Figures
are added to the report, a file of JSON lines, as they are measured, those of all drafters with a
draft length, batch size and temperature at once; its last line is a summary once all are there.
Exit codes: 0; 2 for bad input, and where the report cannot be written; 130 after Ctrl-C, SIGTERM or
a closed terminal; 141 where stdout is closed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from specjax.cli import command
from specjax.cli.bench_config import BenchConfig
from specjax.cli.bench_run import measure_all
from specjax.cli.mesh_config import open_mesh
from specjax.distributed import processes, sharding
from specjax.fields import read_values
from specjax.reporting.report_file import ReportFile, check_writable


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def run(config: BenchConfig, *, verbose: bool) -> int:
        mesh = open_mesh(config.mesh, config.distributed, asdict(config))
        writes = processes.is_first()

        def check() -> Path | None:
            return check_writable(config.report) if config.report and writes else None

        path = processes.together(check)
        width = None if sys.stdout.isatty() else 120
        console = Console(width=width, quiet=not writes, markup=False)
        report = ReportFile(path)
        with sharding.use(mesh):
            measure_all(config, console, mesh, report, verbose=verbose)
        report.finish({"record": "summary"})
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
