"""Folders made by specjax: claimed for a training run, or written and replaced atomically.

A folder with a file that its marker (`folder_checksums`) does not list is never replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from specjax.errors import InputError, one_line
from specjax.files import atomic_writes
from specjax.files.folder_checksums import (
    LOCK,
    Kind,
    Marker,
    contents,
    find_damage,
    read_marker,
    seal,
    write_marker,
)

_REMEDY = "give a new or empty folder"
_EARLIER = "earlier"
"""The name, in the temporary folder, of the folder that is being replaced."""


def check_claimable(folder: Path, kind: Kind, where: str) -> None:
    """Raise InputError unless a folder is new, empty, or from an earlier run of this kind.

    `where`, the field that named the folder and its value, begins the message.
    """
    if not folder.exists():
        return
    check_is_folder(folder, where)
    marker = read_marker(folder)
    if marker is None:
        # A process killed while claiming the folder leaves a temporary file.
        if foreign := _first_foreign(folder, ()):
            raise InputError(f"{where}: holds {foreign!r}, and no {kind} of specjax; {_REMEDY}")
    elif marker.kind != kind or marker.files is not None:
        raise _another_kind(where, marker, kind)


def claim(folder: Path, kind: Kind, where: str) -> None:
    """Mark a folder as the folder of a run, before anything else is written to it.

    Temporary files of a killed process in an earlier run's folder are deleted, so the caller must
    hold the folder's lock. Raises InputError as `check_claimable` does, and if the folder cannot be
    written.
    """
    check_claimable(folder, kind, where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if read_marker(folder) is None:
            write_marker(folder, Marker(kind, None))
        else:
            delete_temporary(folder)
    except OSError as error:
        raise unwritable(where, error) from None


def check_replaceable(folder: Path, kind: Kind, where: str, *, overwrite: bool = True) -> None:
    """Raise InputError unless a folder is new, empty, or sealed as `kind` and unchanged since.

    Without `overwrite` it must be new or empty. Some of its files may have been deleted. The
    message begins with `where` and names a file that specjax did not write, or that changed.
    """
    if not folder.exists():
        return
    check_is_folder(folder, where)
    marker = read_marker(folder)
    files = {} if marker is None or marker.files is None else marker.files
    if marker is not None and (marker.files is None or kind != marker.kind):
        raise _another_kind(where, marker, kind)
    if marker is not None and not overwrite:
        raise InputError(f"{where}: holds a {kind} already; delete it, or write elsewhere")
    if foreign := _first_foreign(folder, files, temporary_too=marker is None):
        raise InputError(
            f"{where}: holds {foreign!r}, which specjax has no record of writing; move it away, or "
            f"{_REMEDY}"
        )
    existing = {name: record for name, record in files.items() if os.path.lexists(folder / name)}
    if changed := find_damage(folder, Marker(kind, existing)):
        raise InputError(f"{where}: {changed}; move it away, or {_REMEDY}")


@contextmanager
def replacing(folder: Path, kind: Kind, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a new folder that replaces `folder`, of the same kind, when the context exits.

    The new folder is then sealed, unless the caller has sealed it. Raises InputError as
    `check_replaceable` does, and if writing fails; after any error the earlier folder is unchanged.
    """
    where = str(folder)
    try:
        folder = folder.resolve()
        check_replaceable(folder, kind, where, overwrite=overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writes.exclusive(folder.parent, folder.name):
            work = folder.parent / atomic_writes.temporary_name(folder.name)
            if work.is_dir():  # a process was killed
                _move_back(work / _EARLIER, folder)
                shutil.rmtree(work)
            new = work / "new"
            new.mkdir(parents=True)
            try:
                yield new
                if read_marker(new) is None:
                    seal(new, kind)
                # Writing may have taken hours.
                check_replaceable(folder, kind, where, overwrite=overwrite)
                _replace(folder, new, work / _EARLIER)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise unwritable(where, error) from None


def _replace(folder: Path, new: Path, earlier: Path) -> None:
    """Move `folder`, if it was sealed, to `earlier`, and rename `new` to `folder`."""
    try:
        if read_marker(folder) is not None:
            folder.rename(earlier)
        else:
            (folder / LOCK).unlink(missing_ok=True)
        new.rename(folder)
    finally:
        _move_back(earlier, folder)


def _move_back(earlier: Path, folder: Path) -> None:
    if earlier.exists() and not folder.exists():
        earlier.rename(folder)


def delete_temporary(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder, or raise OSError."""
    for name in filter(atomic_writes.is_temporary, os.listdir(folder)):
        if (folder / name).is_file():
            (folder / name).unlink()


def unwritable(where: str, error: OSError) -> InputError:
    """Return the InputError for a folder that cannot be written; `where` begins its message."""
    reason = error.strerror or one_line(error)
    return InputError(f"{where}: cannot be written ({reason}); free space or write elsewhere")


def _another_kind(where: str, marker: Marker, wanted: Kind) -> InputError:
    return InputError(
        f"{where}: is a folder of specjax for: {marker.kind}, not {wanted}; {_REMEDY}"
    )


def check_is_folder(folder: Path, where: str) -> None:
    """Raise InputError if the path, which exists, is not a folder."""
    if not folder.is_dir():
        raise InputError(f"{where}: is a file; {_REMEDY}")


def _first_foreign(
    folder: Path, listed: Collection[str], temporary_too: bool = False
) -> str | None:
    """Return the first file or empty folder in `folder` that is not `listed`, or None."""
    try:
        names = contents(folder, temporary_too)
        return next((name for name in names if name not in listed), None)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror or error})") from None
