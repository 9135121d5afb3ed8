"""Atomic writing of files and folders, under temporary names until they are complete.

`is_temporary` recognizes the names of temporary files and folders, and of locks between writers.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

NAMES = {"prefix": ".specjax-", "suffix": ".tmp"}
"""Arguments of `tempfile`'s functions, which put eight characters between them."""
_NAME = re.compile(r"\.specjax-[a-z0-9_]{8}\.tmp", re.ASCII)


def is_temporary(name: str) -> bool:
    """Return whether `name` has the form of the names that specjax gives to temporary files."""
    return _NAME.fullmatch(name) is not None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, opened for writing, that replaces `path` when the context exits.

    After an error `path` is unchanged. Raises OSError if writing fails.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, **NAMES)
    try:
        with open(handle, "wb") as file:
            set_usual_mode(handle)  # mkstemp's file is for its owner only
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def set_usual_mode(file: int | Path) -> None:
    """Give a new file, by path or descriptor, the permissions that the umask gives to new files."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(file, 0o666 & ~mask)


def write_text(path: Path, text: str) -> None:
    r"""Replace the content of a file with `text`, atomically, or raise OSError.

    Lone surrogates, which UTF-8 cannot encode, are escaped as \udXXX, which JSON decodes again.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold a lock while in the context; other threads and processes with the same lock wait.

    A lock is identified by `folder`, which has its file, and by any string `what`. Raises OSError
    if the folder cannot be written or does not support locks.
    """
    path = folder / temporary_name(f"lock of {what}")
    with FileLock(path, fallback_to_soft=False):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # a process that waits for it then creates a new file


def temporary_name(what: str) -> str:
    """Return a temporary name for the file or folder identified by the string `what`.

    It is the same in every process.
    """
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{NAMES['prefix']}{digest}{NAMES['suffix']}"
