"""A lock that allows only one run at a time in a folder, and that ends with its process."""

from __future__ import annotations

import datetime
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files import folder_checksums, folders
from specjax.files.folder_checksums import LOCK, Kind

_LONGEST_COMMAND = 200


@contextmanager
def hold(folder: Path, kind: Kind, where: str) -> Iterator[None]:
    """Lock a folder, while in the context, against other runs, and claim it for this run.

    Claiming marks the folder as one of `kind` (`folders.claim`). Every process of the run must call
    this; process 0 claims and locks. `where`, the field that named the folder and its value, begins
    error messages. Raises InputError as `folders.claim` does, and if another run, which the message
    names, holds the lock.
    """
    with ExitStack() as stack:
        enter = lambda: stack.enter_context(lock(folder, kind, where))  # noqa: E731
        processes.together(lambda: enter() if processes.is_first() else None)
        yield


@contextmanager
def lock(folder: Path, kind: Kind, where: str) -> Iterator[None]:
    """Claim and lock a folder as `hold` does, for a run with one process and without any device."""
    folders.check_claimable(folder, kind, where)
    file = folder / LOCK
    if os.path.lexists(file) and not folder_checksums.is_lock(file):
        raise InputError(
            f"{where}: holds a {LOCK} that is no lock of specjax; move it away, or use another "
            "folder"
        )
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A file's mere existence would be no lock: it would outlive a killed run.
            stack.enter_context(FileLock(file, timeout=0, fallback_to_soft=False))
            folders.claim(folder, kind, where)
            file.write_text(_holder(), encoding="utf-8")
        except Timeout:
            holder = file.read_text(encoding="utf-8").strip() or "it has not said which"
            raise InputError(
                f"{where}: another run is at work there ({holder}); wait for it, stop it, or use "
                "another folder"
            ) from None
        except OSError as error:
            raise folders.unwritable(where, error) from None
        yield


def _holder() -> str:
    """Return the line that identifies a run in its lock file: process, host, time and command."""
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    command = " ".join(shlex.join(sys.orig_argv).split())
    holder = f"pid {os.getpid()} on {socket.gethostname()}, since {since}"
    return f"{holder}: {command:.{_LONGEST_COMMAND}}\n"
