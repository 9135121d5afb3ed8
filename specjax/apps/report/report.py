"""Compare decode runs: tables by task in Spec-Bench's layout, CSV, Spec-Bench JSONL, pictures.

    python -m specjax.report a.jsonl b.jsonl --out=DIR [--predict] [--formats=png,svg]
    python -m specjax.report a.jsonl --html=FILE

Reads files written by `python -m specjax.decode --config.report=FILE`, with runs of one target on
the same prompts (a file may hold several drafters). Writes report.md, report.html (the same with
its pictures, in one file), report.csv, one JSONL file per run and pictures to DIR, fastest run
first. `--predict` loads the target and times the parts of each run's rounds to predict the
speed-up. An earlier report in DIR is replaced, unless it changed or DIR holds anything else.
Interrupted runs are marked; beside them only prompts that all runs answered are compared. `--html`
loads the target, computes the rounds of the first answers again, and writes them into one page that
shows them step by step (docs/serving.md).

Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, Positional, run_flags
from specjax.apps.playground import page
from specjax.apps.report import csv_jsonl, html_page, picture_files, plots, tables
from specjax.apps.report.runs import Entry, by_conditions, comparable, in_order, labels
from specjax.apps.rows.records import read_reports
from specjax.apps.run.predicted_speedup import predicted_speedups
from specjax.errors import InputError, printable
from specjax.fields import Choice, Flag, OutputFile, OutputFolder, optional
from specjax.files import atomic_writes, folders
from specjax.files.path_checks import output_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        _report, Flags, argv, program="python -m specjax.report", documentation=__doc__
    )


def _report(given: Flags) -> int:
    """Run the command with its flags; return its exit code. Raises InputError."""
    flags = dict(vars(given))
    html = flags.pop("html")
    if flags["out"] is None and html is None:
        raise InputError("out is missing: pass --out=DIR, or --html=FILE; --help lists the flags")
    if html is not None:
        page.check_page(html)
    written = [] if flags["out"] is None else write(**flags)
    if html is not None:
        runs = [run for path in _named(flags["paths"]) for run in read_reports(path)]
        page.write_runs(html, runs, lambda doing: print(f"{printable(doing)} ..."))
        written.append(html)
    for path in written:
        print(f"wrote {printable(str(path))}")
    return 0


def check_out(out: str | Path) -> None:
    """Raise InputError, before any long work, if no report can be written to the folder `out`."""
    folders.check_replaceable(output_folder("out", out), "report", f"out={str(out)!r}")


def write(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    predict: bool = False,
    pictures: bool = True,
    formats: Sequence[str] = picture_files.FORMATS[:1],
) -> list[Path]:
    """Write a report of the runs in the files `paths` to the folder `out`; print the leaderboard.

    With `predict`, the speed-ups of the runs are predicted on this machine. Pictures are drawn in
    each of `formats`, or omitted without matplotlib. Returns the files written. Raises InputError
    for bad input, before anything is written.
    """
    paths = _named(paths)
    if pictures and not plots.has_matplotlib():
        print("no pictures: matplotlib is missing; pip install 'specjax[plots]'", file=sys.stderr)
        pictures = False
    runs = comparable([run for path in paths for run in read_reports(path)])
    check_out(out)
    predicted = [None] * len(runs)
    if predict:
        predicted = predicted_speedups(runs, lambda doing: print(f"{printable(doing)} ..."))
    entries = [Entry.of(*fields) for fields in zip(runs, labels(runs), predicted, strict=True)]
    folder = output_folder("out", out)
    with folders.replacing(folder, "report") as new:
        names = _write_files(new, in_order(entries), formats if pictures else ())
    for conditions, group in by_conditions(in_order(entries)).items():
        print(f"{conditions}\n\n{tables.leaderboard(group)}")
        if note := tables.incomplete(group):
            print(note)
    return [folder / name for name in names]


def _named(paths: Sequence[str | Path]) -> Sequence[str | Path]:
    """Return `paths`; raise InputError if there are none."""
    if not paths:
        raise InputError("no reports: name the files that specjax.decode wrote")
    return paths


def _write_files(folder: Path, entries: Sequence[Entry], formats: Sequence[str]) -> list[str]:
    """Write a report's files to a folder and return their names. Raises OSError."""
    drawn = picture_files.draw(folder, entries, formats) if formats else {}
    pictures = sorted(file.name for file in folder.iterdir())
    markdown = tables.markdown(entries, drawn)
    texts = {
        "report.md": markdown,
        "report.html": html_page.page(
            markdown, {name: (folder / name).read_bytes() for name in pictures}
        ),
        "report.csv": csv_jsonl.csv_text(entries),
    }
    texts |= {
        f"{name}.jsonl": csv_jsonl.jsonl_text(entry)
        for name, entry in zip(_file_names(entries), entries, strict=True)
    }
    for name, text in texts.items():
        atomic_writes.write_text(folder / name, text)
    return [*texts, *pictures]


def _file_names(entries: Sequence[Entry]) -> list[str]:
    """Return a distinct file name for each entry."""
    names = [entry.label for entry in entries]
    if len({entry.run.conditions.temperature for entry in entries}) > 1:
        names = [f"{entry.label} t{entry.run.conditions.temperature:g}" for entry in entries]
    names = [re.sub(r"[^\w.=+-]+", "_", name).strip("_.") or "run" for name in names]
    first: Mapping[str, int] = {name.lower(): names.index(name) for name in reversed(names)}
    return [
        name if first[name.lower()] == index else f"{name}-{index + 1}"
        for index, name in enumerate(names)
    ]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `specjax.report`."""

    paths: Annotated[tuple[str, ...], Positional("FILE")]
    """The reports to compare."""
    out: Annotated[Path | None, optional(OutputFolder())] = None
    """The folder to write into."""
    html: Annotated[Path | None, optional(OutputFile())] = None
    """The page to write."""
    predict: Annotated[bool, Flag()] = False
    """Time the parts of rounds on this machine."""
    pictures: Annotated[bool, Flag()] = True
    """Draw pictures."""
    formats: Annotated[tuple[str, ...] | str, Listed(Choice(picture_files.FORMATS))] = "png"
    """Picture formats, among png,svg,pdf."""


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
