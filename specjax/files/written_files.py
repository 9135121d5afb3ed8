"""Files written into a folder that the user names, where only files of specjax are replaced.

The folder's marker (`files.folder_marker`) lists what was written; other files are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from specjax.errors import InputError
from specjax.files import folder_marker
from specjax.files.atomic_writes import exclusive, write_text
from specjax.files.folder_marker import Kind, Marker, Record

_ANNOUNCED = Record(-1, "")
"""Recorded while a file is being written, so that one left by a kill is known to be specjax's."""


class WrittenFiles:
    """The files of one kind in a folder; `field` is the field that named the folder, for errors.

    Raises InputError for a folder whose marker is of another kind.
    """

    def __init__(self, field: str, folder: Path, kind: Kind) -> None:
        self.folder, self._said, self._kind = folder, f"{field}={str(folder)!r}", kind
        self._records = self._listed_there()

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError for a name whose file exists and was not written by this kind."""
        for name in names:
            path = self.folder / name
            if not os.path.lexists(path):
                continue
            if name not in self._records or path.is_symlink() or not path.is_file():
                why = f"was not written as part of a {self._kind}"
            elif self._records[name] in (_ANNOUNCED, folder_marker.record_of(path)):
                continue
            else:
                why = "was changed since it was written"
            raise InputError(
                f"{self._said}: {name} there {why}, and would be replaced; move it, or name "
                "another folder"
            )

    def write(self, name: str, text: str) -> Path:
        """Write a text file; returns its path. Raises as `check`, and OSError."""
        return self._put(name, lambda path: write_text(path, text))

    def move(self, file: Path) -> Path:
        """Move a file here from a folder on the same disk; returns and raises as `write`."""
        return self._put(file.name, lambda path: os.replace(file, path))

    def _put(self, name: str, put: Callable[[Path], object]) -> Path:
        # Another process may have written other files since, and may write this one now.
        with exclusive(self.folder, folder_marker.MARKER):
            self._records = self._listed_there()
            self.check([name])
            self._list(name, _ANNOUNCED)
            put(self.folder / name)
            self._list(name, folder_marker.record_of(self.folder / name))
        return self.folder / name

    def _listed_there(self) -> dict[str, Record]:
        marker = folder_marker.read_marker(self.folder)
        if marker is not None and marker.kind != self._kind:
            raise InputError(
                f"{self._said} holds a {marker.kind}, not a {self._kind}; name another folder"
            )
        return {} if marker is None else dict(marker.files or {})

    def _list(self, name: str, record: Record) -> None:
        self._records[name] = record
        folder_marker.write_marker(self.folder, Marker(self._kind, self._records))
