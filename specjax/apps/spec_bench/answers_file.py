"""The answers of a cell that earlier runs finished, read from the cell's file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from specjax.apps.rows.records import DecodedRow, read_report
from specjax.errors import InputError, one_line


def finished_rows(
    path: Path, turns: Mapping[int | str, int], tell: Callable[[str], None]
) -> list[DecodedRow]:
    """Return the rows of the questions that a cell's file answers in all of their `turns`.

    `turns` is the number of turns by question id. If a process was killed while writing, the
    unfinished end of the file is removed, and `tell` is called with a line about it. Raises
    InputError for a file that is damaged in any other way.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
        lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
        # A question is one write, the first together with the header: without rows none is whole.
        rows = list(read_report(path).rows) if len(lines) > 1 else []
        while rows and sum(row.question_id == rows[-1].question_id for row in rows) != turns.get(
            rows[-1].question_id
        ):
            rows.pop()
        summary = len(lines) - 1 - len(read_report(path).rows) if rows else 0
        kept = b"".join(lines[: 1 + len(rows) + summary]) if rows else b""
        if kept != text:
            os.truncate(path, len(kept))
            tell(f"{path}: its end was cut off when the run was killed; that question is repeated")
    except OSError as error:
        raise InputError(f"out: {str(path)!r} cannot be read: {one_line(error)}") from None
    return rows
