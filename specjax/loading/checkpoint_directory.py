"""The directory of a checkpoint: names and numbers of its folders, their checks and deletion.

A directory holds one checkpoint, `specjax-1`, with a marker (`files.folder_marker`), which lists
its files. A save over it writes into `specjax-2.unfinished`, from where the checkpoint is moved
once it has its marker, and deletes the earlier one afterwards: wherever a save is interrupted, a
whole checkpoint is left, and the next save deletes what was not finished.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from specjax.errors import InputError
from specjax.files import atomic_writes, folder_marker, folders

Kind = Literal["model", "drafter"]

_NAME = "specjax-{}"
_UNFINISHED = ".unfinished"
_OURS = re.compile(rf"specjax-([1-9]\d*)({re.escape(_UNFINISHED)})?", re.ASCII)
"""A checkpoint's name, or that of the folder in which it is written."""


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of specjax, finished or of an interrupted save."""
    if not directory.is_dir() or (directory / "config.json").exists():
        return False
    return any(_OURS.fullmatch(name) for name in _names(directory))


def newest(directory: Path) -> Path:
    """The checkpoint of a directory; raises InputError where there is none."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give one that specjax saved")
    if numbers := _numbers(directory):
        return directory / _NAME.format(numbers[-1])
    if is_checkpoint(directory):
        raise InputError(
            f"{directory}: the only save into it was interrupted and is incomplete; save again"
        )
    raise InputError(f"{directory}: holds no checkpoint; give a directory that specjax saved")


def unfinished(directory: Path, number: int) -> Path:
    """The folder into which a save of that number writes."""
    return atomic_writes.path_of(directory, _NAME.format(number) + _UNFINISHED)


def committed(directory: Path, number: int) -> Path:
    """The folder of a complete checkpoint of that number."""
    return directory / _NAME.format(number)


def check_free(directory: Path, kind: Kind, overwrite: bool, where: str | None = None) -> None:
    """Raise InputError where `save` would: a directory that holds files that `save` did not write.

    An existing checkpoint is an error without `overwrite`; with it, one of another kind, one that
    was changed, or one with a file that `save` did not write is. `where` begins the message; the
    default is the path.
    """
    where = where or str(directory)
    if not directory.exists():
        return
    folders.check_is_folder(directory, where)
    for name in _names(directory):
        match = _OURS.fullmatch(name)
        ours = match and (not match[2] or _is_unfinished(directory / name, kind))
        if not ours and name[0] != ".":
            raise InputError(
                f"{where}: holds {name!r}, which is no part of a checkpoint; "
                "give a new or empty directory"
            )
    if _numbers(directory) and not overwrite:
        raise InputError(
            f"{where}: holds a checkpoint already; give another directory, or overwrite=True "
            "to replace it"
        )
    for number in _numbers(directory):
        path = directory / _NAME.format(number)
        try:
            marker = folder_marker.read_marker(path)
        except InputError:
            marker = None
        # Without a readable marker it may not be specjax's: it is not deleted.
        if marker is not None:
            folders.check_replaceable(path, kind, str(path))


def _is_unfinished(path: Path, kind: Kind) -> bool:
    return atomic_writes.is_unfinished(path, f"{kind} {path.name}")


def begin(directory: Path, kind: Kind, overwrite: bool, stack: ExitStack) -> int:
    """The number of a new save, whose folder is made; it is deleted at the end of the context."""
    try:
        check_free(directory, kind, overwrite)
        directory.mkdir(parents=True, exist_ok=True)
        matches = (_OURS.fullmatch(name) for name in _names(directory))
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        while True:
            name = _NAME.format(number) + _UNFINISHED
            try:
                stack.enter_context(atomic_writes.unfinished(directory, f"{kind} {name}", name))
            except FileExistsError:  # a concurrent save has taken the number
                number += 1
                continue
            return number
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None


def delete_all_but_newest(directory: Path, kind: Kind) -> None:
    """Delete a directory's earlier checkpoints, and what saves into it have left unfinished."""
    with suppress(InputError, OSError):
        _delete_checkpoints(directory, kind, keep=max(_numbers(directory), default=0))


def delete(directory: Path, kind: Kind) -> None:
    """Delete a directory's checkpoints of a kind, and the directory if nothing else is in it."""
    with suppress(InputError, OSError):
        _delete_checkpoints(directory, kind, keep=None)
        directory.rmdir()


def _delete_checkpoints(directory: Path, kind: Kind, keep: int | None) -> None:
    for name in _names(directory):
        match = _OURS.fullmatch(name)
        if match and match[2]:
            # Iterating deletes them.
            list(atomic_writes.abandoned(directory, f"{kind} {name}", name.__eq__))
        elif match and int(match[1]) != keep:
            with suppress(InputError):
                marker = folder_marker.read_marker(directory / name)
                if marker is not None and marker.kind == kind:
                    folders.delete(directory / name)


def read_marker(directory: Path, path: Path) -> folder_marker.Marker:
    """The marker of a checkpoint, which is written last; raises InputError without one."""
    try:
        marker = folder_marker.read_marker(path)
    except InputError as error:
        raise damaged(directory, str(error)) from None
    if marker is None or marker.files is None:
        raise InputError(
            f"{directory}: {path.name} lacks its commit marker, {folder_marker.MARKER}: not saved "
            "by specjax, or damaged; copy it again, whole, or save elsewhere"
        )
    return marker


def damaged(directory: Path, how: str) -> InputError:
    """The error for a checkpoint that is not what was saved."""
    return InputError(
        f"{directory}: the checkpoint is damaged or truncated ({how}); copy it again, or save "
        "elsewhere"
    )


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise InputError(f"{directory}: cannot be read ({error.strerror or error})") from None


def _numbers(directory: Path) -> list[int]:
    """The numbers of the checkpoints that were committed, in order."""
    found = (_OURS.fullmatch(name) for name in _names(directory))
    return sorted(int(match[1]) for match in found if match and not match[2])
