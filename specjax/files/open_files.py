"""Opening files that may be pipes, devices or folders, without waiting for ever."""

from __future__ import annotations

import io
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from specjax.errors import InputError

WRITER_SECONDS = 10
"""How long to wait for a pipe's writer, in seconds."""
_FIRST_BYTES = 8


def regular_file(path: Path, remedy: str = "put a file there") -> Path:
    """The path of a file inside a folder, for a reader that opens it by its name.

    Raises InputError naming it where a folder, a pipe or a device is there: what opens those may
    wait for ever. A missing or unreadable file is not an error here, but in the reader.
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


def open_pipe(path: Path) -> io.BufferedReader:
    """A file or a pipe, opened, for reading from its beginning to its end.

    A pipe must have a writer within `WRITER_SECONDS`, which may then take its time. A peek into
    what is returned sees its first bytes. Raises OSError, and InputError where no writer comes.
    """
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        first = b""
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            first = _wait_for_writer(path, file)
            os.set_blocking(file.fileno(), True)
            # A peek reads at most once, and has to see the bytes that identify the format.
            while len(first) < _FIRST_BYTES and (more := file.read(_FIRST_BYTES - len(first))):
                first += more
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Continued(first, file))


def _wait_for_writer(path: Path, file: io.FileIO) -> bytes:
    """The bytes that a writer has written so far; empty where it has closed the pipe already."""
    events = select.poll()
    events.register(file, select.POLLIN)
    end = time.monotonic() + WRITER_SECONDS
    while True:
        # From a pipe, None means that there is a writer which has written nothing, and an end of
        # file that there is no writer yet, or that it has ended: then the kernel reports POLLHUP.
        ended = any(event & select.POLLHUP for _, event in events.poll(0))
        first = file.read(1 << 16)
        if first is None or first or ended:
            return first or b""
        if time.monotonic() >= end:
            raise InputError(
                f"{path}: a pipe that nobody has written to for {WRITER_SECONDS} seconds; start "
                "its writer, or name a file"
            )
        time.sleep(0.02)


class _Continued(io.RawIOBase):
    """What was read of a file, then the rest of it."""

    def __init__(self, first: bytes, rest: io.FileIO) -> None:
        self._first, self._rest = first, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if not self._first:
            return self._rest.readinto(buffer)
        count = min(len(buffer), len(self._first))
        buffer[:count], self._first = self._first[:count], self._first[count:]
        return count

    def close(self) -> None:
        self._rest.close()
        super().close()


def _check_regular(path: Path, status: os.stat_result, remedy: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise InputError(f"{path} is {what}, not a file; {remedy}")
