"""The directory of a checkpoint: how its folders are named, found and checked.

A directory holds one checkpoint, in a folder `specjax-N`, or, in the run of a training, the newest
ones, in folders `step-N`. Each is sealed by a marker (`files.folder_marker`) that lists its files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specjax.errors import InputError
from specjax.files import folder_marker, folders

Kind = Literal["model", "drafter"]

CONTENT = "specjax_checkpoint.json"
"""The metadata of a checkpoint, beside its arrays; earlier versions kept them in Orbax's."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""What Orbax appends to the name of a folder while it writes it."""


@dataclass(frozen=True)
class Numbered:
    """Names of folders: a prefix and a number, with zeros up to so many digits.

    The methods with `step` are those that Orbax asks for (`NameFormat`).
    """

    prefix: str
    digits: int = 1

    def path(self, directory: Path, number: int) -> Path:
        """The folder of a checkpoint."""
        return directory / self.build_name(number)

    def unfinished(self, directory: Path, number: int) -> Path:
        """The folder in which Orbax writes it, before it gets its name."""
        return directory / (self.build_name(number) + _UNFINISHED)

    def all_unfinished(self, directory: Path) -> list[Path]:
        """The folders in which Orbax was writing when it was stopped."""
        pattern = rf"{self.prefix}-\d{{{self.digits},}}{re.escape(_UNFINISHED)}"
        names = _names(directory) if directory.is_dir() else ()
        return [directory / name for name in names if re.fullmatch(pattern, name, re.ASCII)]

    def numbers(self, directory: Path) -> list[int]:
        """The numbers of the folders that are there and were finished, in order."""
        pattern = re.compile(rf"{self.prefix}-(\d{{{self.digits},}})", re.ASCII)
        found = map(pattern.fullmatch, _names(directory) if directory.is_dir() else ())
        return sorted(int(match[1]) for match in found if match)

    def build_name(self, step: int) -> str:
        """The name of a folder."""
        return f"{self.prefix}-{step:0{self.digits}d}"

    def find_step(self, base_path: Any, step: int) -> Any:
        """What Orbax keeps of a folder that is there."""
        # Slow to import, and needed only for saving.
        from orbax.checkpoint.path import step as orbax_step

        return orbax_step.Metadata(step=step, path=base_path / self.build_name(step))

    def find_all(self, base_path: Any) -> list[Any]:
        """The same of all folders."""
        return [self.find_step(base_path, step) for step in self.numbers(Path(base_path))]


SAVES = Numbered("specjax")
"""A save over an earlier one has the next number; the earlier one is deleted afterwards."""


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of specjax, finished or of an interrupted save."""
    if not directory.is_dir() or (directory / "config.json").exists():
        return False
    return (directory / CONTENT).is_file() or any(map(_is_ours, _names(directory)))


def newest(directory: Path) -> Path:
    """The folder of a directory's checkpoint; raises InputError where there is none."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give one that specjax saved")
    if (directory / CONTENT).is_file():  # a step of a training run
        return directory
    if numbers := SAVES.numbers(directory):
        return SAVES.path(directory, numbers[-1])
    if is_checkpoint(directory):
        raise InputError(
            f"{directory}: the only save into it was interrupted and is incomplete; save again"
        )
    raise InputError(f"{directory}: holds no checkpoint; give a directory that specjax saved")


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
        if not _is_ours(name) and name[0] != ".":
            raise InputError(
                f"{where}: holds {name!r}, which is no part of a checkpoint; "
                "give a new or empty directory"
            )
    numbers = SAVES.numbers(directory)
    if numbers and not overwrite:
        raise InputError(
            f"{where}: holds a checkpoint already; give another directory, or overwrite=True "
            "to replace it"
        )
    for number in numbers:
        path = SAVES.path(directory, number)
        folders.check_replaceable(path, kind, str(path))


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


def _is_ours(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint, or of one that Orbax is writing."""
    pattern = rf"{SAVES.prefix}-[1-9]\d*({re.escape(_UNFINISHED)})?"
    return re.fullmatch(pattern, name, re.ASCII) is not None


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise InputError(f"{directory}: cannot be read ({error.strerror or error})") from None
