"""One run at a time in a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files import folder_marker, folders
from specjax.files.atomic_writes import open_without_links
from specjax.files.folder_marker import LOCK, Kind

_LONGEST_COMMAND = 200
_WAIT_FOR_TEXT_S = 1.0
"""Seconds to wait for the process that has just taken the lock to write its name into it."""


@contextmanager
def hold(folder: Path, kind: Kind, where: str) -> Iterator[None]:
    """Claim a folder for this run and lock it against other runs until the context ends.

    Every process of the run makes the call; the first one claims and locks. `where` begins the
    messages: the field that named the folder, with its value. Raises InputError as
    `folders.claim` does, and where another run holds the lock, naming it.
    """
    with ExitStack() as stack:
        taken = lambda: stack.enter_context(lock(folder, kind, where))  # noqa: E731
        processes.together(lambda: taken() if processes.is_first() else None)
        yield


@contextmanager
def lock(folder: Path, kind: Kind, where: str) -> Iterator[int]:
    """As `hold`, for a run that is one process: no device is touched.

    Yields the lock's file descriptor: a process that inherits it keeps the lock until it ends too.
    """
    folders.check_claimable(folder, kind, where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opening must not lose the text of who holds the lock, nor a file that a link leads to.
        handle = open_without_links(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        if os.path.lexists(folder / LOCK) and not _is_plain(folder / LOCK):
            raise _not_ours(where) from None
        raise folders.unwritable(where, error) from None
    with open(handle, "a+", encoding="utf-8") as file:
        _lock(file, where)
        folders.claim(folder, kind, where)
        yield file.fileno()


def _lock(file: IO[str], where: str) -> None:
    try:
        # Of the open file, not of the process: it ends when the last process that has it open does.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"{where}: another run is at work there ({_holder(file)}); wait for it, stop it, or "
            "use another folder"
        ) from None
    except OSError as error:
        raise InputError(
            f"{where}: cannot be locked ({error.strerror or error}); use a folder on a file system "
            "with locks"
        ) from None
    if not folder_marker.is_lock(file.fileno()):
        raise _not_ours(where)
    content = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": shlex.join(sys.orig_argv),
    }
    try:
        file.truncate(0)
        file.write(json.dumps(content) + "\n")
        file.flush()
    except OSError as error:
        raise folders.unwritable(where, error) from None


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _not_ours(where: str) -> InputError:
    return InputError(
        f"{where}: holds a {LOCK} that is no lock of specjax; move it away, or use another folder"
    )


def _holder(file: IO[str]) -> str:
    """Who has locked a file, from its text."""
    until = time.monotonic() + _WAIT_FOR_TEXT_S
    while True:
        file.seek(0)
        try:
            said = json.loads(file.read())
            command = " ".join(str(said["command"]).split())
            return (
                f"pid {said['pid']} on {said['host']}, since {said['since']}: "
                f"{command:.{_LONGEST_COMMAND}}"
            )
        except (ValueError, KeyError, TypeError, OSError):
            if time.monotonic() > until:
                return "it has not said which"
        time.sleep(0.05)
