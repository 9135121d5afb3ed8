"""Temporary files and folders beside what is being written, and which of them are abandoned.

`is_temporary` recognises their names. An unfinished folder holds a note, which its writer keeps
locked: where the lock is free, the writer has ended and the folder is abandoned.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NAMES = {"prefix": ".specjax-", "suffix": ".tmp"}
"""What every function of `tempfile` is given; it adds eight characters."""
_NAME = re.compile(r"\.specjax-[a-z0-9_]{8}\.tmp", re.ASCII)

_NOTE = "specjax_unfinished.json"
_WORK, EARLIER = "new", "earlier"
_LONGEST_NOTE = 1 << 14


def is_temporary(name: str) -> bool:
    """Whether a file's name is one that specjax gives to its temporary files."""
    return _NAME.fullmatch(name) is not None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the context ends without an error.

    Raises OSError where that fails; the earlier file is then still there.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, **NAMES)
    try:
        with open(handle, "wb") as file:
            # mkstemp's file is for its owner only; the written file has ordinary permissions.
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(handle, 0o666 & ~mask)
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def unfinished(parent: Path, of: str, name: str | None = None) -> Iterator[Path]:
    """A new path for a file or folder that will be moved into `parent` when it is finished.

    It is in a new folder of `parent`, with the given name or a random one, and `EARLIER` beside it
    is for what it replaces. `of` is the text that `abandoned` looks for. Whatever is left at the
    path, or at the path with a suffix, is deleted at the end; `EARLIER` and other files are not.
    Raises OSError, and FileExistsError for a name that is taken.
    """
    if name is None:
        folder = Path(tempfile.mkdtemp(dir=parent, **NAMES))
    else:
        folder = parent / name
        folder.mkdir()
    handle = -1
    try:
        handle = os.open(folder / _NOTE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(handle, _note(of))
        yield path_of(parent, folder.name)
    finally:
        _discard(folder)
        if handle >= 0:
            os.close(handle)


def path_of(parent: Path, name: str) -> Path:
    """The path that `unfinished` yields for a name, for another process."""
    return parent / name / _WORK


def abandoned(parent: Path, of: str, named: Callable[[str], bool] = is_temporary) -> Iterator[Path]:
    """The folders of `unfinished` whose writers have ended; each is deleted after its turn.

    `named` selects folders by name.
    """
    for name in sorted(filter(named, os.listdir(parent))):
        handle = _take(parent / name, of)
        if handle is not None:
            try:
                yield parent / name
                _discard(parent / name)
            finally:
                os.close(handle)


def is_unfinished(folder: Path, of: str) -> bool:
    """Whether a folder is one of `unfinished`, its writer at work or not."""
    handle = _open_note(folder)
    if handle is None:
        return False
    try:
        # Its writer may not have come to writing the note.
        return os.read(handle, _LONGEST_NOTE) in (b"", _note(of))
    finally:
        os.close(handle)


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """A lock against other threads and processes that use the same `what`, for quick changes.

    Raises OSError where the folder cannot be written. On a file system without locks it has no
    effect.
    """
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:8]
    path = folder / f"{NAMES['prefix']}{digest}{NAMES['suffix']}"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        handle = os.open(path, flags, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            # The previous holder has deleted the file that it had locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    try:
        yield
    finally:
        with suppress(OSError):
            if not os.fstat(handle).st_size:
                os.unlink(path)
        os.close(handle)


def open_without_links(path: Path, flags: int) -> int:
    """A descriptor of a regular file that is no link; raises OSError for anything else."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError("not a regular file")


def _note(of: str) -> bytes:
    return json.dumps({"specjax_unfinished": of}).encode() + b"\n"


def _open_note(folder: Path) -> int | None:
    if folder.is_symlink():
        return None
    try:
        return open_without_links(folder / _NOTE, os.O_RDWR)
    except OSError:
        return None


def _take(folder: Path, of: str) -> int | None:
    """The locked note of a folder whose writer has ended; None where that is not known."""
    handle = _open_note(folder)
    if handle is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.read(handle, _LONGEST_NOTE) == _note(of):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _discard(folder: Path) -> None:
    """Delete the work in a folder, and the folder if nothing else is in it."""
    with suppress(OSError):
        names = os.listdir(folder)
        for name in names:
            if name == _WORK or name.startswith(f"{_WORK}."):
                shutil.rmtree(folder / name, ignore_errors=True)
        if set(os.listdir(folder)) <= {_NOTE}:
            with suppress(FileNotFoundError):
                (folder / _NOTE).unlink()
            folder.rmdir()
