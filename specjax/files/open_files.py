"""Opening of files in folders that may hold a pipe, a device or a folder in their place."""

from __future__ import annotations

import io
import os
import stat
from contextlib import suppress
from pathlib import Path

from specjax.errors import InputError


def regular_file(path: Path, remedy: str = "put a file there") -> Path:
    """Return `path` after verifying that a reader can open it by name without blocking.

    Raises InputError, naming the path and ending with `remedy`, if it is a folder, a pipe or a
    device. Missing and unreadable files pass, since the reader reports them.
    """
    with suppress(OSError):
        _check_regular(path, path.stat(), remedy)
    return path


def regular_files(folder: Path, remedy: str = "remove it") -> Path:
    """Return `folder` after verifying that all files in it and its subfolders are regular.

    Use it before another library reads the folder. Links to folders are not followed. Raises
    InputError as `regular_file` does.
    """
    for inside, _, names in os.walk(folder):
        for name in names:
            regular_file(Path(inside, name), remedy)
    return folder


def open_regular(path: Path, remedy: str = "put a file there") -> io.BufferedReader:
    """Return a regular file, open for reading bytes.

    Raises OSError if that fails, and InputError, ending with `remedy`, for a folder, a pipe or a
    device.
    """
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
