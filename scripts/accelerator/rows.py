"""The rows of a run as JSON lines, appended as measured, so that a run can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
"""What is measured: `kind`, and where it applies `model`, `layers`, `batch`, `context`, ..."""

MEASURED, NO_FIT, NO_MEMORY = "measured", "does not fit", "out of memory"
SKIPPED, FAILED = "skipped", "failed"
_FINAL = (MEASURED, NO_MEMORY, FAILED)
"""Statuses that another try would not change; other cells are tried again."""


class Rows:
    """The rows of a file that were taken with the same settings; others stay as they are."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self._last: dict[str, dict[str, Any]] = {}
        for row in read_rows(path):
            if row.get("settings") == settings:
                self._last[_key({name: row[name] for name in row["cell"]})] = row

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's last row, if it has one."""
        return self._last.get(_key(cell))

    def done(self, cell: Cell, retry_failed: bool = False) -> bool:
        """Whether the cell needs no further try."""
        row = self.find(cell)
        if row is None or (retry_failed and row["status"] == FAILED):
            return False
        return row["status"] in _FINAL

    def measured(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Measured rows of a kind with these fields, in the order of the file."""
        wanted = {"kind": kind, "status": MEASURED, **fields}
        return [
            row
            for row in self._last.values()
            if all(row.get(name) == value for name, value in wanted.items())
        ]

    def without_figures(self) -> list[tuple[dict[str, Any], str]]:
        """The rows without figures, each with its cell in words."""
        return [
            (row, describe({name: row[name] for name in row["cell"]}))
            for row in self._last.values()
            if row["status"] != MEASURED
        ]

    def add(self, cell: Cell, status: str, **values: Any) -> None:
        """Append a row immediately, unless it repeats the reason for a cell's missing figures."""
        row = {**cell, "status": status, **values}
        row |= {"cell": list(cell), "settings": self.settings}
        known = self.find(cell)
        again = known is not None and status != MEASURED and known["status"] == status
        self._last[_key(cell)] = row
        if again and known.get("reason") == row.get("reason"):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+", encoding="utf-8") as file:
            file.write(_missing_newline(self.path) + json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every complete row of a file; a truncated line is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "cell" in row:
            rows.append(row)
    return rows


def describe(cell: Cell) -> str:
    """The cell in words, for progress lines."""
    words = [cell["kind"]]
    if "model" in cell:
        words = [f"{cell['model']} ({cell['layers']} layers)", cell["kind"]]
    words += [
        f"{name} {value}" for name, value in cell.items() if name not in ("kind", "model", "layers")
    ]
    return ", ".join(words)


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _missing_newline(path: Path) -> str:
    """A newline where the file's last line is truncated, else nothing."""
    if not path.exists() or not path.stat().st_size:
        return ""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return "" if file.read() == b"\n" else "\n"
