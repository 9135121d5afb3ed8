r"""Decode a grid of config values, one run per cell, and report them together.

    python scripts/sweep.py --config=configs/decode_smollm2.py --out=DIR \
        config.num_speculative_tokens=1,2,4,8 config.drafter.name=ngram,early_exit

A field without dashes has several values, one with dashes (`--config.limit=3`) is the same in all
cells. Each cell is a process of its own, compared with plain decoding; its report and its output
stay in DIR/cells. Finished cells are skipped, so the same command resumes where it was stopped.
Then `specjax.report` writes DIR/report-1/report.md and the rest, a folder for each target and set
of prompts. `--predict` times the parts of rounds as well,
`--nopictures` leaves pictures out. Exit codes: 0; 1 where a cell failed or its tokens differ from
plain decoding's; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import ml_collections

from lib.child_processes import INTERRUPTED, run_child
from specjax import decode, report
from specjax.cli import command
from specjax.cli.config_file import read_config
from specjax.cli.decode_config import read_decode_config
from specjax.cli.flags import Parser
from specjax.errors import InputError, one_line
from specjax.fields import Flag, OutputFolder, dotted
from specjax.reporting.records import Run, read_report
from specjax.reporting.report_file import check_writable
from specjax.reporting.statistics import OVERALL, figures_by_task


@dataclass(frozen=True)
class Cell:
    """One run: the values that distinguish it, all of its arguments, and its report's path."""

    values: str
    arguments: tuple[str, ...]
    report: Path

    @property
    def log(self) -> Path:
        """The file of the run's output."""
        return self.report.with_suffix(".log")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return command.run(_sweep, argv, __doc__, interrupted=INTERRUPTED)


def _sweep(argv: list[str]) -> int:
    options, fixed, grid = _options(argv)
    cells = make_cells(options.out, fixed, grid)
    return sweep(cells, options)


def sweep(cells: Sequence[Cell], options: SimpleNamespace) -> int:
    """Run what is not finished, then report; returns the exit code."""
    code = run_cells(cells)
    runs = {cell: finished(cell) for cell in cells}
    groups: dict[Any, list[Path]] = {}
    for cell, run in runs.items():
        if run is not None:
            key = (run.target, run.prompts)
            groups.setdefault(key, []).append(cell.report)
    for number, paths in enumerate(groups.values(), start=1):
        folder = options.out / f"report-{number}"
        for path in report.write(paths, folder, predict=options.predict, pictures=options.pictures):
            _say(f"wrote {path}")
    return code


def run_cells(cells: Sequence[Cell]) -> int:
    """Run what is not finished; returns 1 where a cell failed or is not exact, else 0."""
    runs = {cell: finished(cell) for cell in cells}
    left = [cell for cell in cells if runs[cell] is None]
    _say(f"{len(cells)} cells, {len(cells) - len(left)} of them finished")
    failed, seconds = False, []
    for number, cell in enumerate(left, start=1):
        to_go = len(left) - number + 1
        eta = f", ETA {_duration(fmean(seconds) * to_go)}" if seconds else ""
        _say(f"[{number}/{len(left)}] {cell.values} ...{eta}")
        begin = time.perf_counter()
        status = run_cell(cell)
        seconds.append(time.perf_counter() - begin)
        if status == command.INTERRUPTED:
            raise KeyboardInterrupt
        runs[cell] = finished(cell)
        failed |= status != 0
        _say(f"    {_result(cell, runs[cell], status)}, {_duration(seconds[-1])}")
    return int(failed or not all(run.exact for run in runs.values() if run is not None))


def make_cells(out: Path, fixed: Sequence[str], grid: dict[str, list[str]]) -> list[Cell]:
    """The cells of a grid, the last field changing fastest; every config is checked."""
    folder = out / "cells"
    cells = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        arguments = (*fixed, *(f"--{name}={value}" for name, value in chosen.items()))
        said = " ".join(f"{name.removeprefix('config.')}={v}" for name, v in chosen.items())
        try:
            config = read_config(list(arguments), decode.CONFIG)
            if not any(re.match(r"--(no)?config\.compare\b", one) for one in arguments):
                config.compare = True
                arguments = (*arguments, "--config.compare=true")
            if len(read_decode_config(config.to_dict()).drafters) > 1:
                raise InputError(
                    f"drafter.name={config.drafter.name!r}: a cell has one drafter; sweep "
                    f"config.drafter.name={config.drafter.name}"
                )
        except InputError as error:
            raise InputError(f"cell {said or 'without values'}: {one_line(error)}") from None
        except (AttributeError, KeyError) as error:
            raise InputError(
                f"config: this is no config of specjax.decode ({one_line(error)}); pass one"
            ) from None
        name = f"{_slug(said)}-{_digest(config)}.jsonl" if said else f"{_digest(config)}.jsonl"
        cells.append(Cell(said or "the only cell", arguments, folder / name))
    if len({cell.report for cell in cells}) < len(cells):
        raise InputError(f"{' '.join(grid)}: a value is given twice; leave one of them out")
    report.check_out(out / "report-1")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={str(out)!r} cannot be written: {one_line(error)}") from None
    for cell in cells:
        check_writable(cell.report)
    return cells


def finished(cell: Cell) -> Run | None:
    """The report of a cell that ran to its end, with no turn refused."""
    if not cell.report.exists():
        return None
    try:
        run = read_report(cell.report)
    except InputError:
        # Another version's: the cell is run again.
        return None
    return None if run.end.interrupted or run.end.refused else run


def run_cell(cell: Cell) -> int | None:
    """Decode a cell in a process of its own; returns its exit code."""
    command = [sys.executable, "-m", "specjax.decode", *cell.arguments]
    with open(cell.log, "w", encoding="utf-8") as log:
        return run_child([*command, f"--config.report={cell.report}"], log=log)


def _result(cell: Cell, run: Run | None, status: int | None) -> str:
    if run is None:
        lines = cell.log.read_text(encoding="utf-8").splitlines() if cell.log.exists() else []
        return f"FAILED with exit code {status}: {lines[-1] if lines else 'no output'} ({cell.log})"
    figures = figures_by_task(run)[OVERALL]
    speedup = "" if figures.speedup is None else f", {figures.speedup:.2f}x"
    warning = "" if run.exact else ", TOKENS DIFFER from plain decoding's"
    return f"tau {figures.counts.acceptance_length:.2f}{speedup}{warning}"


def parser() -> Parser:
    """The sweep's own flags."""
    flags = Parser("python scripts/sweep.py", __doc__)
    flags.add_field("out", OutputFolder(), "folder of the sweep")
    flags.add_field("predict", Flag(), "time the parts of rounds", default=False)
    flags.add_field("pictures", Flag(), "draw pictures", default=True)
    return flags


def _options(argv: list[str]) -> tuple[SimpleNamespace, list[str], dict[str, list[str]]]:
    """The sweep's own options, the arguments of every cell, and the grid."""
    own = [one for one in argv if re.match(r"--?(out|(no)?predict|(no)?pictures)\b", one)]
    fixed = [one for one in argv if re.match(r"--?(no)?config\b", one)]
    grid: dict[str, list[str]] = {}
    for one in argv:
        if one in own or one in fixed:
            continue
        match = re.fullmatch(r"(config\.[\w.]+)=(.+)", one, flags=re.DOTALL)
        if match is None:
            raise InputError(f"{one!r} is not understood: use config.field=value,value; see --help")
        if match[1] in grid:
            raise InputError(f"{match[1]} is given twice: name its values once")
        grid[match[1]] = list(_split(match[2]))
    for name in ("config.report", *(field for field in grid if f"--{field}" in _names(fixed))):
        if name in grid or f"--{name}" in _names(fixed):
            why = "every cell has one of its own" if name == "config.report" else "it is swept"
            raise InputError(f"--{name}: {why}; leave it out")
    values = SimpleNamespace(**parser().read(own))
    return values, fixed, grid


def _names(arguments: Sequence[str]) -> set[str]:
    return {"--" + one.lstrip("-").partition("=")[0] for one in arguments}


def _split(values: str) -> Iterator[str]:
    """The values between commas that no bracket encloses."""
    depth, begin = 0, 0
    for index, letter in enumerate(values):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield values[begin:index]
            begin = index + 1
    yield values[begin:]


def _slug(values: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", values)[:120]


def _digest(config: ml_collections.ConfigDict) -> str:
    """A hash of a config, independent of the order of its fields; part of a cell's name."""
    fields = {name: value for name, value in dotted(config.to_dict()).items() if name != "report"}
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:10]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
