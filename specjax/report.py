"""Compare decode runs: tables by task in Spec-Bench's layout, CSV, Spec-Bench JSONL, pictures.

    python -m specjax.report a.jsonl b.jsonl --out=DIR [--predict] [--nopictures]

Reads what `python -m specjax.decode --config.report=FILE` wrote, runs of one target over the same
prompts (several in a file of several drafters). Into DIR go report.md, report.csv, one JSONL file
per run and the pictures. `--predict` loads the target and times the parts of each run's rounds, for
the predicted speed-up.
The written files are listed in DIR/specjax_folder.json: files of the
same names that are not listed there, or were changed since, are not replaced. Interrupted runs are
named.
Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.cli.predicted_speedup import predicted_speedups
from specjax.errors import InputError, one_line
from specjax.fields import Flag, OutputFolder
from specjax.files import atomic_writes
from specjax.files.paths import output_folder
from specjax.files.written_files import WrittenFiles
from specjax.reporting import csv_jsonl, picture_files, plots, tables
from specjax.reporting.records import read_reports
from specjax.reporting.runs import Entry, by_conditions, check_together, in_order, labels

_ALWAYS = ("report.md", "report.csv")
_DRAWN = "pictures"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return command.run(_report, argv, parser().format_help())


def _report(argv: list[str]) -> int:
    for path in write(**parser().read(argv)):
        print(f"wrote {path}")
    return 0


def check_out(out: str | Path) -> None:
    """Raise InputError where no report can be written into a folder; before long work."""
    _open_folder(out).check(_ALWAYS)


def write(
    paths: Sequence[str | Path], out: str | Path, *, predict: bool = False, pictures: bool = True
) -> list[Path]:
    """Report the runs of some files into a folder, and print the leaderboard.

    Returns the files written. Raises InputError for bad input, before anything is written.
    """
    if not paths:
        raise InputError("no reports: name the files that specjax.decode wrote")
    if pictures:
        plots.require_matplotlib()
    runs = [run for path in paths for run in read_reports(path)]
    check_together(runs)
    files = _open_folder(out)
    names = [f"{name}.jsonl" for name in _file_names(labels(runs))]
    groups = len({run.conditions for run in runs})
    names += picture_files.file_names(groups) if pictures else ()
    files.check([*_ALWAYS, *names])
    predicted = [None] * len(runs)
    if predict:
        predicted = predicted_speedups(runs, lambda doing: print(f"{doing} ..."))
    entries = [Entry.of(*one) for one in zip(runs, labels(runs), predicted, strict=True)]
    try:
        return _write_all(files, in_order(entries), pictures)
    except OSError as error:
        raise _unwritable(out, error) from None


def _write_all(files: WrittenFiles, entries: Sequence[Entry], pictures: bool) -> list[Path]:
    names = _file_names([entry.label for entry in entries])
    texts = {"report.csv": csv_jsonl.csv_text(entries)}
    texts |= {
        f"{name}.jsonl": csv_jsonl.jsonl_text(entry)
        for name, entry in zip(names, entries, strict=True)
    }
    with atomic_writes.work_folder(files.folder, _DRAWN) as drawing:
        drawn = picture_files.draw(drawing, entries) if pictures else {}
        texts = {"report.md": tables.markdown(entries, drawn), **texts}
        written = [files.write(name, text) for name, text in texts.items()]
        written += [files.move(picture) for picture in sorted(drawing.iterdir())]
    for conditions, group in by_conditions(entries).items():
        print(f"{conditions}\n\n{tables.leaderboard(group)}")
        if note := tables.incomplete(group):
            print(note)
    return written


def _file_names(names: Sequence[str]) -> list[str]:
    """A file name for each label, none twice."""
    names = [re.sub(r"[^\w.=+-]+", "_", name).strip("_.") or "run" for name in names]
    taken: Mapping[str, int] = {name.lower(): names.index(name) for name in reversed(names)}
    return [
        name if taken[name.lower()] == index else f"{name}-{index + 1}"
        for index, name in enumerate(names)
    ]


def _unwritable(out: str | Path, error: OSError) -> InputError:
    return InputError(f"out={str(out)!r} cannot be written: {one_line(error)}; name another folder")


def _open_folder(out: str | Path) -> WrittenFiles:
    folder = output_folder("out", out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, **atomic_writes.NAMES):
            pass
    except OSError as error:
        raise _unwritable(out, error) from None
    return WrittenFiles("out", folder, "report")


def parser() -> Parser:
    """The flags, and the files to read."""
    flags = Parser("python -m specjax.report", __doc__)
    flags.add_argument("paths", nargs="*", metavar="FILE", help="reports to compare")
    flags.add_field("out", OutputFolder(), "the folder to write into")
    flags.add_field("predict", Flag(), "time the parts of rounds", default=False)
    flags.add_field("pictures", Flag(), "draw pictures", default=True)
    return flags


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
