"""Opening files in folders, where a pipe, a device or another folder may be in their place."""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from pathlib import Path

from specjax.errors import InputError


def regular_file(path: Path, remedy: str = "put a file there") -> Path:
    """The path of a file inside a folder, for a reader that opens it by its name.

    Raises InputError naming it where a folder, a pipe or a device is there: what opens those may
    never end. A missing or unreadable file is not an error here, but in the reader.
    """
    with suppress(OSError):
        _check_regular(path, path.stat(), remedy)
    return path


def regular_files(folder: Path, remedy: str = "take it away") -> Path:
    """A folder of which another library reads whatever is in it; raises as `regular_file` does.

    Folders inside are looked into, links to them are not followed.
    """
    for inside, _, names in os.walk(folder):
        for name in names:
            regular_file(Path(inside, name), remedy)
    return folder


def open_regular(path: Path, remedy: str = "put a file there") -> io.BufferedReader:
    """A regular file, opened; raises OSError, and InputError as `regular_file` does."""
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
