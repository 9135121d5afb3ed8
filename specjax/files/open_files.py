"""Open files in folders that may hold a pipe, a device or a folder instead."""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from pathlib import Path

from specjax.errors import InputError


def regular_file(path: Path, remedy: str = "put a file there") -> Path:
    """Return the path of a file inside a folder, for a reader that opens it by name.

    Raises InputError, naming it, for a folder, a pipe or a device, which a reader might block on.
    The reader handles missing and unreadable files.
    """
    with suppress(OSError):
        _check_regular(path, path.stat(), remedy)
    return path


def regular_files(folder: Path, remedy: str = "take it away") -> Path:
    """Return a folder whose files another library reads. Raises as `regular_file` does.

    Subfolders are checked; links to folders are not followed.
    """
    for inside, _, names in os.walk(folder):
        for name in names:
            regular_file(Path(inside, name), remedy)
    return folder


def open_regular(path: Path, remedy: str = "put a file there") -> io.BufferedReader:
    """Open a regular file. Raises OSError, and InputError as `regular_file` does."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(handle), remedy)
    except InputError:
        os.close(handle)
        raise
    return io.BufferedReader(io.FileIO(handle))


def _check_regular(path: Path, status: os.stat_result, remedy: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise InputError(f"{path} is {what}, not a file; {remedy}")
