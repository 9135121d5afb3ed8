"""Files and folders that are written whole or not at all, under temporary names until then.

`is_temporary` recognises the names of temporary files and folders, and of locks between writers.
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
"""What every function of `tempfile` is given; it adds eight characters."""
_NAME = re.compile(r"\.specjax-[a-z0-9_]{8}\.tmp", re.ASCII)


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


def write_text(path: Path, text: str) -> None:
    r"""Replace a file's content by a text; raises as `replacing`.

    What UTF-8 cannot encode (half of a surrogate pair) is escaped as \udXXX, which JSON reads back
    as it was.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """A lock against other threads and processes that use the same `what`, which wait.

    Raises OSError where the folder cannot be written or has no locks.
    """
    path = folder / temporary_name(f"lock of {what}")
    with FileLock(path, fallback_to_soft=False):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for the deleted file takes a new one


def temporary_name(what: str) -> str:
    """The name of a temporary file or folder for `what`, the same in every process."""
    digest = hashlib.sha256(what.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{NAMES['prefix']}{digest}{NAMES['suffix']}"
