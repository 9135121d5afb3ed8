"""Files written into a folder that the user names, where they may replace none but their own.

`specjax.json` in the folder lists what was written, with a digest of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from specjax.errors import InputError
from specjax.json_files import read_json_file
from specjax.text_files import write_text

LISTING = "specjax.json"


class WrittenFiles:
    """The files of one kind in a folder; `field` names what held the folder's path.

    Raises InputError for a folder that lists files of another kind.
    """

    def __init__(self, field: str, folder: Path, kind: str) -> None:
        self.folder, self._said, self._kind = folder, f"{field}={str(folder)!r}", kind
        self._digests: dict[str, str | None] = {}
        listing = folder / LISTING
        if not listing.exists():
            return
        content = read_json_file(listing, "name another folder, or delete it")
        files = content.get("files") if isinstance(content, dict) else None
        if not isinstance(files, dict) or content.get("specjax_folder") != 1:
            raise InputError(f"{self._said}: {LISTING} there is not specjax's; name another folder")
        if content.get("kind") != kind:
            raise InputError(
                f"{self._said} holds a {content.get('kind')!s:.40}, not a {kind}; "
                "name another folder"
            )
        self._digests = files

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError where a file of such a name is there that was not written from here."""
        for name in names:
            path = self.folder / name
            if not os.path.lexists(path):
                continue
            if name not in self._digests or path.is_symlink() or not path.is_file():
                why = f"was not written as part of a {self._kind}"
            elif self._digests[name] in (None, _digest(path)):
                continue
            else:
                why = "was changed since it was written"
            raise InputError(
                f"{self._said}: {name} there {why}, and would be replaced; move it, or name "
                "another folder"
            )

    def write(self, name: str, text: str) -> Path:
        """Write a text file; as `check`, and raises OSError where it cannot be written."""
        self._announce(name)
        write_text(self.folder / name, text)
        return self._listed(name)

    def move(self, file: Path) -> Path:
        """Move a file here from a folder on the same disk; as `write`."""
        self._announce(file.name)
        os.replace(file, self.folder / file.name)
        return self._listed(file.name)

    def _announce(self, name: str) -> None:
        """List a file before it is written: one that a kill leaves behind is then known."""
        self.check([name])
        self._digests[name] = None
        self._save()

    def _listed(self, name: str) -> Path:
        self._digests[name] = _digest(self.folder / name)
        self._save()
        return self.folder / name

    def _save(self) -> None:
        content = {"specjax_folder": 1, "kind": self._kind, "files": self._digests}
        write_text(self.folder / LISTING, json.dumps(content, indent=1) + "\n")

    def list_all(self) -> None:
        """List every file of the folder as it is now."""
        paths = [path for path in self.folder.iterdir() if path.name != LISTING]
        self._digests = {path.name: _digest(path) for path in paths}
        self._save()

    def are_whole(self) -> bool:
        """Whether there are listed files, all of them as they were written."""
        try:
            return bool(self._digests) and all(
                digest == _digest(self.folder / name) for name, digest in self._digests.items()
            )
        except OSError:
            return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
