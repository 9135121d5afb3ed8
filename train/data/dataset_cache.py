"""Datasets that specjax makes, in a cache folder: made once, and again where damaged."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from specjax.errors import InputError
from specjax.files import folder_marker


def prepared(
    directory: Path, make: Callable[[], Any], field: str, tell: Callable[[str], Any] = print
) -> Path:
    """The directory of a dataset, which `make` writes and seals where it is not there yet.

    One that is damaged or incomplete is made again, and `tell` takes a line that says so. Processes
    that want the same dataset wait for each other. `field` is the field that the user can set to
    choose another directory. Raises InputError, naming it, where nothing can be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / f".{directory.name}.lock").open("ab") as lock:
            # Not every file system can keep a process waiting.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():
                if _is_whole(directory):
                    return directory
                tell(f"{directory}: this dataset is damaged or incomplete, and is made again")
                shutil.rmtree(directory)
            make()
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be written ({error.strerror or error}); free space there, or use "
            f"another {field}"
        ) from None
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        marker = folder_marker.read_marker(directory)
    except InputError:  # the marker itself is damaged
        return False
    return bool(marker and marker.files) and folder_marker.find_damage(directory, marker) is None
