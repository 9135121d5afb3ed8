"""Paths that users name: the one place where a text becomes a path.

Each function takes the name of the field that held the text, and raises InputError naming field,
value and remedy for a path that cannot be what the field asks for. Nothing is created or written.
For files inside a folder, which no field names, there are `regular_file` and `open_regular`.
"""

from __future__ import annotations

import io
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from specjax.errors import InputError, shown

_DEVICES = ("/dev", "/proc", "/sys")
"""Below these a name stands for a device or a process, also where it looks like a file."""

_SHARED_MEMORY = "/dev/shm"
"""But here are ordinary files."""

WRITER_SECONDS = 10
"""How long a pipe may be without a writer."""
_FIRST_BYTES = 8


def user_path(field: str, value: str | os.PathLike[str]) -> Path:
    """The absolute path that a text means, `~` expanded; it need not exist.

    Raises InputError for what no path can be: empty, too long, with a NUL, `~` of an unknown user,
    below something that is a file, or in a folder that may not be entered.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputError(f"{field}={shown(value)}: use a path")
    if not text.strip():
        raise InputError(f"{field}={text!r} is empty: name a file or a folder")
    if "\0" in text:
        raise InputError(f"{field}={shown(text, 200)}: a path holds no NUL; write it without")
    try:
        path = Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # a user, or a working directory, that is not there
        raise InputError(
            f"{field}={shown(text, 200)}: {str(error).rstrip('.')}; write the path in full"
        ) from None
    _status(field, text, path)
    return path


def input_file(field: str, value: str | os.PathLike[str], *, pipe: bool = False) -> Path:
    """The path of a file that can be read; raises InputError where there is none.

    With `pipe` it may be a pipe, for `open_pipe` to read: one that was made with mkfifo, or
    /dev/stdin and /proc/self/fd/N where these are pipes.
    """
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is None:
        raise _refusal(field, value, ": no such file; check the path")
    if stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a folder: name a file in it")
    if stat.S_ISFIFO(status.st_mode) and not pipe:
        raise _refusal(field, value, " is a pipe: name a file")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
        raise _refusal(field, value, " is a device: name a file")
    if not os.access(path, os.R_OK):
        raise _refusal(field, value, ": you may not read it; change its permissions")
    return path


def input_folder(field: str, value: str | os.PathLike[str]) -> Path:
    """The path of a folder that can be listed; raises InputError where there is none."""
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is None:
        raise _refusal(field, value, ": no such folder; check the path")
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a file: name a folder")
    if not os.access(path, os.R_OK | os.X_OK):
        raise _refusal(field, value, ": you may not read it; change its permissions")
    return path


def output_file(field: str, value: str | os.PathLike[str]) -> Path:
    """The path of a regular file, there or not, in a folder that is there and may be written to.

    Links are followed. Raises InputError for folders, devices, pipes, and whatever else must not
    be replaced by a file.
    """
    path = user_path(field, value)
    # As it is written too: /dev/stdout may lead to an ordinary file.
    if any(map(_is_device, (Path(os.path.normpath(path)), path.resolve()))):
        raise _refusal(field, value, " is a device: name a file")
    status = _status(field, value, path)
    ends_as_folder = os.path.basename(os.fspath(value)) in ("", ".", "..")
    if ends_as_folder or (status is not None and stat.S_ISDIR(status.st_mode)):
        raise _refusal(field, value, " is a folder: name a file in it")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise _refusal(field, value, " is no regular file: name another")
    link, path = path.is_symlink(), path.resolve()
    if not path.parent.is_dir():
        leads = f" leads to {shown(str(path), 200)}" if link else ""
        raise _refusal(field, value, f"{leads}: its folder does not exist; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refusal(field, value, ": its folder may not be written to; choose another one")
    return path


def output_folder(field: str, value: str | os.PathLike[str]) -> Path:
    """The path of a folder that is there, or that can be made; who owns it: `folders`."""
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a file: name a folder")
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise _refusal(field, value, f": {there} may not be written to; choose another folder")
    return path


def cache_folder(part: str) -> Path:
    """The folder of one of specjax's caches, under XDG_CACHE_HOME or ~/.cache; as `output_folder`.

    It need not exist.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return output_folder("XDG_CACHE_HOME", f"{home}/specjax/{part}")


def _is_device(path: Path) -> bool:
    in_memory = path.is_relative_to(_SHARED_MEMORY) and path != Path(_SHARED_MEMORY)
    return not in_memory and any(path.is_relative_to(folder) for folder in _DEVICES)


def regular_file(path: Path, remedy: str = "put a file there") -> Path:
    """The path of a file inside a folder, for a reader that opens it by its name.

    Raises InputError naming it where a folder, a pipe or a device is there: what opens those may
    wait for ever. What is missing or cannot be looked at is for the reader to say.
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
            # A peek reads no more than once, and should see what tells formats apart.
            while len(first) < _FIRST_BYTES and (more := file.read(_FIRST_BYTES - len(first))):
                first += more
    except BaseException:
        file.close()
        raise
    return io.BufferedReader(_Continued(first, file))


def _wait_for_writer(path: Path, file: io.FileIO) -> bytes:
    """What a writer has written so far; nothing where one has come and gone."""
    events = select.poll()
    events.register(file, select.POLLIN)
    end = time.monotonic() + WRITER_SECONDS
    while True:
        # Of a pipe, None means that there is a writer which has written nothing, and an end
        # that there is none, or none any more: then the kernel reports POLLHUP.
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


def _status(field: str, value: str | os.PathLike[str], path: Path) -> os.stat_result | None:
    """What is there, links followed; None where nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise _refusal(
            field, value, ": a part of it is a file, not a folder; check the path"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(field, value, f": {reason}; use another path") from None


def _refusal(field: str, value: str | os.PathLike[str], what: str) -> InputError:
    # Of a path the end tells more than the beginning, so there is room for it.
    return InputError(f"{field}={shown(str(value), 200)}{what}")
