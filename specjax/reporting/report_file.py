"""The file of a JSON report: checked before the run, written during it and at its end."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from specjax import signals
from specjax.errors import NO_SPACE, InputError, one_line
from specjax.files import folder_marker
from specjax.files.atomic_writes import NAMES
from specjax.files.paths import output_file
from specjax.files.text_files import write_text
from specjax.reporting.read import is_report

_TRIED_BYTES = 64 << 20
"""Bytes that are written to check for free space; beyond that the file system is asked."""
_SHARE = 1 / 20
"""At most this share of the run's time goes into writing the report while it grows."""


def check_writable(value: str | os.PathLike[str], size: int = 0, field: str = "report") -> Path:
    """The path of a report of about `size` bytes, checked to be writable before the long work.

    Raises InputError for anything but a regular file, an existing file that is neither empty nor a
    report, a file name that specjax reserves, and as `check_space`. An existing file is unchanged.
    """
    path = output_file(field, value)
    said = f"{field}={os.fspath(value)!r}"
    if folder_marker.is_kept(path):
        raise InputError(f"{said} is a file that specjax reserves; name another file")
    try:
        ours = not path.exists() or not path.stat().st_size or is_report(path)
    except OSError as error:
        raise InputError(f"{said} cannot be read: {one_line(error)}; choose another file") from None
    if not ours:
        raise InputError(
            f"{said} is a file that is no report, and would be replaced; move it away, or name "
            "another file"
        )
    check_space(path, size, said)
    return path


def check_space(path: Path, size: int, said: str) -> None:
    """Raise InputError where a folder, disk, quota or limit does not allow a file of that size.

    `said` begins the message: the field that named the file, with its value.
    """
    size = max(size, 4096)
    try:
        with tempfile.TemporaryFile(dir=path.parent, **NAMES) as file:
            _reserve(file.fileno(), size)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise InputError(
                f"{said}: no space for a report of up to {-(-size // 1000)} kB "
                f"({error.strerror}); free some, or choose another folder"
            ) from None
        raise InputError(
            f"{said} cannot be written: {one_line(error)}; choose another folder"
        ) from None


def _reserve(handle: int, size: int) -> None:
    """Raise OSError unless a file can grow to a size."""
    os.ftruncate(handle, size)  # takes no space, but is refused above a limit on files' sizes
    room = os.fstatvfs(handle)
    if room.f_bavail * room.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        # Only allocating the space shows what a quota leaves.
        os.posix_fallocate(handle, 0, min(size, _TRIED_BYTES))
    except AttributeError:  # not on this system
        pass
    except OSError as error:
        if error.errno in NO_SPACE:
            raise


def write_json(path: Path, content: Any) -> None:
    """Write `json_text`, whole or not at all. Raises OSError, and TypeError as that does."""
    write_text(path, json_text(content))


def json_text(content: Any) -> str:
    """A value as JSON, non-finite numbers as null. Raises TypeError for other objects."""
    text = json.dumps(_with_finite_numbers(content), indent=1, ensure_ascii=False, allow_nan=False)
    # A list of numbers on one line, so that token ids are readable. In a text no line ends.
    text = re.sub(r"\[\n[\s\d.,eE+-]*\]", lambda match: " ".join(match[0].split()), text)
    return text + "\n"


def _with_finite_numbers(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {name: _with_finite_numbers(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_with_finite_numbers(value) for value in content]
    return content


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


class ReportFile:
    """A report that is rewritten repeatedly during its run.

    `content(interrupted)` gives the report of what is finished so far. Used as a context manager:
    whatever ends the run, what `grew` was called for is written. Without a path nothing is written.
    """

    def __init__(
        self,
        path: Path | None,
        content: Callable[[bool], Mapping[str, Any]],
        tell: Callable[[str], None] = _tell,
    ) -> None:
        self._path, self._content, self._tell = path, content, tell
        self._grown = self._unsaved = self._troubled = False
        self._next = float("-inf")

    def grew(self) -> None:
        """Write what is finished, unless the previous write was too recent.

        A failure is reported once, and does not end the run.
        """
        self._grown = self._unsaved = True
        begin = time.monotonic()
        if self._path is None or begin < self._next:
            return
        try:
            write_json(self._path, self._content(True))
            self._unsaved = False
        except OSError as error:
            if not self._troubled:
                self._troubled = True
                self._tell(
                    f"report {self._path} cannot be written now ({error.strerror or error}); "
                    "the run continues, and tries again"
                )
        end = time.monotonic()
        self._next = end + (end - begin) / _SHARE

    def finish(self, interrupted: bool = False) -> bool:
        """Write the last report while signals are held off; returns whether one was written.

        A run that was interrupted with nothing finished leaves an earlier report unchanged. Raises
        InputError where the report cannot be written; the message says where it is instead: in a
        temporary folder, or on stdout as JSON lines.
        """
        self._unsaved = False
        if self._path is None or (interrupted and not self._grown and self._path.exists()):
            return False
        with signals.held_off():
            content = self._content(interrupted)
            try:
                write_json(self._path, content)
            except OSError as error:
                raise InputError(
                    f"report={str(self._path)!r} cannot be written ({error.strerror or error}); "
                    f"what was finished is {_kept_elsewhere(self._path.name, content)}; free "
                    "space, and copy it there"
                ) from None
        return True

    def __enter__(self) -> ReportFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._unsaved:
            try:
                self.finish(interrupted=True)
            except InputError as failure:
                # The error that ended the run has to be shown as well.
                self._tell(one_line(failure))


def _kept_elsewhere(name: str, content: Mapping[str, Any]) -> str:
    """Write a report where there is space for it; returns where, in words."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="specjax-"))
        write_json(folder / name, content)
        return f"in {folder / name}"
    except OSError:
        if folder is not None:
            with suppress(OSError):
                folder.rmdir()
    for value in content.values():
        for one in value if isinstance(value, list) else [value]:
            print(json.dumps(_with_finite_numbers(one)))
    sys.stdout.flush()
    return "above, on stdout, as JSON lines"
