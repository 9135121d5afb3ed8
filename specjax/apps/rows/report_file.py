"""A report's file, which is checked before the run and then written line by line."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from specjax import signals
from specjax.apps.rows.records import is_report
from specjax.distributed import processes
from specjax.errors import NO_SPACE, InputError, one_line
from specjax.files import folder_checksums
from specjax.files.path_checks import output_file


def check_writable(value: str | os.PathLike[str], field: str = "report") -> Path:
    """Return the path `value` of a report after checking, before long work, that it can be written.

    Creates the folder; an existing file is unchanged. Raises InputError, naming `field`, for
    anything but a regular file, an existing file that is neither empty nor a report, a reserved
    file name, and a folder or disk that cannot be written.
    """
    path = output_file(field, value)
    named = f"{field}={os.fspath(value)!r}"
    if folder_checksums.is_kept(path):
        raise InputError(f"{named} is a file that specjax reserves; name another file")
    try:
        replaceable = not path.exists() or not path.stat().st_size or is_report(path)
    except OSError as error:
        raise InputError(
            f"{named} cannot be read: {one_line(error)}; choose another file"
        ) from None
    if not replaceable:
        raise InputError(
            f"{named} is a file that is no report, and would be replaced; move it away, or name "
            "another file"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        what = "no space for a report" if error.errno in NO_SPACE else "cannot be written"
        raise InputError(f"{named}: {what} ({one_line(error)}); choose another folder") from None
    return path


def check_together(value: str | os.PathLike[str] | None) -> Path | None:
    """Return what `check_writable` does for a report, in the first process; otherwise None.

    Raises InputError in all processes.
    """

    def check() -> Path | None:
        return check_writable(value) if value is not None and processes.is_first() else None

    return processes.together(check)


def json_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON, with NaN and infinite numbers as null.

    Raises TypeError for a value that JSON does not have.
    """
    return json.dumps(_with_finite_numbers(record), ensure_ascii=False, allow_nan=False) + "\n"


def _with_finite_numbers(content: Any) -> Any:
    """Return JSON content with non-finite numbers replaced by None."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: _with_finite_numbers(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_finite_numbers(value) for value in content]
    return content


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


class ReportFile:
    """A file of JSON lines that grows during a run; without a path nothing is written.

    An earlier report is replaced when the first record is added, or continued if `resumed`. `tell`
    is called with a line if records cannot be written.
    """

    def __init__(
        self,
        path: Path | None,
        tell: Callable[[str], None] = _print_error,
        *,
        resumed: bool = False,
    ) -> None:
        self._path, self._tell = path, tell
        self._waiting = ""
        self._begun, self._reported = resumed, False

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records to the file, one per line.

        Records that cannot be written now are kept for later, with one warning. Raises
        KeyboardInterrupt after writing if a signal to stop arrived meanwhile, also while an
        iterator made the records.
        """
        requests_to_end: list[int] = []
        try:
            with signals.received_by(requests_to_end.append):
                self._write(records)
        except OSError as error:
            if not self._reported:
                self._reported = True
                self._tell(
                    f"report {self._path} cannot be written now ({error.strerror or error}); "
                    "the run continues, and tries again"
                )
        if requests_to_end:
            raise KeyboardInterrupt

    def finish(self, records: Iterable[Mapping[str, Any]] = ()) -> bool:
        """Write the last records and those still pending; return whether there is a file.

        If that fails, print them on stdout and raise InputError.
        """
        try:
            with signals.held_off():
                self._write(records)
        except OSError as error:
            print(self._waiting, end="", flush=True)
            raise InputError(
                f"report={str(self._path)!r} cannot be written ({error.strerror or error}); what "
                "is not in it is above, on stdout, as JSON lines; free space, and append it"
            ) from None
        return self._path is not None

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append all pending records and `records`, or nothing if that raises OSError."""
        if self._path is None:
            return
        self._waiting += "".join(map(json_line, records))
        # Half of a surrogate pair cannot be encoded, so it is escaped as in JSON.
        lines = self._waiting.encode("utf-8", "backslashreplace")
        with self._path.open("ab" if self._begun else "wb", buffering=0) as file:
            self._begun, before = True, file.tell()
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except OSError:
                file.truncate(before)
                raise
            self._waiting = ""
