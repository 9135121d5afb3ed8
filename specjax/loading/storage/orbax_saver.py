"""Numbered checkpoints of a training run, written in the background; the newest are kept.

Orbax's checkpoint manager writes, commits and deletes them. Added here are the checksums
(`files.folder_checksums`), written just before the commit, and the rule that no folder with a
user's file is deleted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.storage.checkpoint_directory import ARRAYS, CONTENT, Kind, content_text
from specjax.loading.storage.orbax_checkpoint import (
    attempt,
    saving_context,
    silenced,
    writable,
    write_content,
    written,
)

_UNFINISHED = ".orbax-checkpoint-tmp"
"""The suffix of a folder's name while Orbax writes the folder."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Numbered:
    """The names of numbered checkpoint folders: `prefix`, then a number of `digits` digits or more.

    The methods `build_name`, `find_step` and `find_all` implement Orbax's `NameFormat`.
    """

    prefix: str
    digits: int = 1

    def path(self, directory: Path, number: int) -> Path:
        """Return the path of checkpoint `number` in `directory`."""
        return directory / self.build_name(number)

    def unfinished(self, directory: Path, number: int) -> Path:
        """Return the path of the temporary folder in which Orbax writes checkpoint `number`."""
        return directory / (self.build_name(number) + _UNFINISHED)

    def all_unfinished(self, directory: Path) -> list[Path]:
        """Return the temporary folders that interrupted writes left in `directory`."""
        numbers = self._found(directory, _UNFINISHED)
        return [self.unfinished(directory, number) for number in numbers]

    def numbers(self, directory: Path) -> list[int]:
        """Return the numbers of the finished checkpoints in `directory`, ascending."""
        return self._found(directory, "")

    def _found(self, directory: Path, suffix: str) -> list[int]:
        pattern = re.compile(rf"{self.prefix}-(\d{{{self.digits},}}){re.escape(suffix)}", re.ASCII)
        try:
            names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
        except OSError as error:
            raise InputError(f"{directory}: cannot be read ({error.strerror or error})") from None
        return sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)

    def build_name(self, step: int) -> str:
        """Return the name of the folder for checkpoint `step`."""
        return f"{self.prefix}-{step:0{self.digits}d}"

    def find_step(self, base_path: Any, step: int) -> Any:
        """Return Orbax's metadata of an existing checkpoint in the folder `base_path`."""
        # Slow to import, and needed only for saving.
        from orbax.checkpoint.path import step as orbax_step

        return orbax_step.Metadata(step=step, path=base_path / self.build_name(step))

    def find_all(self, base_path: Any) -> list[Any]:
        """Return Orbax's metadata of all existing checkpoints in the folder `base_path`."""
        return [self.find_step(base_path, step) for step in self.numbers(Path(base_path))]


class Saver:
    """A context that saves numbered checkpoints into a directory, in the background.

    It keeps the newest `kept` checkpoints, and all that contain a file which specjax did not write.
    Only one process, or one group of connected processes, may use the directory at a time. Leaving
    the context waits for the last save. All errors are InputErrors.
    """

    def __init__(self, directory: Path, kind: Kind, names: Numbered, kept: int) -> None:
        self._directory, self._kind, self._names, self._kept = directory, kind, names, kept
        self._number, self._content = 0, ""
        self._pending: Any = None

    def __enter__(self) -> Saver:
        with ExitStack() as stack:
            stack.enter_context(silenced())
            self._attempt(self._open)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        with self._stack:
            try:
                if kind is None:  # otherwise the error in the block is the one to report
                    self.wait()
            finally:
                attempt(lambda ocp: self._manager.close())

    def save(self, number: int, params: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Start to write a nested dict of arrays and JSON metadata, after the previous save.

        The arrays are copied before this returns, and may then be donated. Raises InputError as
        `orbax_checkpoint.save` does.
        """
        content = processes.together(lambda: content_text(self._directory, params, metadata))
        self.wait()
        self._number, self._content = number, content
        arrays = writable(params)
        self._pending = self._attempt(
            lambda ocp: self._manager.save_async(
                number, arrays, checkpointable_name=ARRAYS, force=True
            )
        )

    def wait(self) -> None:
        """Wait until the last save is on disk; raise InputError if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._attempt(lambda ocp: pending.result())

    def _delete_unfinished(self) -> None:
        """Delete the folders of interrupted saves, unless they have a file not by specjax."""
        for path in self._names.all_unfinished(self._directory):
            with suppress(OSError):
                if not _holds_more(path):
                    shutil.rmtree(path)

    def _open(self, ocp: Any) -> None:
        if processes.is_first():
            self._delete_unfinished()
        context = saving_context(ocp)
        # Orbax deep-copies its options, which would copy the object of a bound method.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        self._manager = ocp.training.Checkpointer(
            self._directory,
            context=context,
            step_name_format=self._names,
            preservation_policy=_Preservation(self._directory, self._names, self._kept),
            cleanup_tmp_directories=False,  # it would delete any folder with such a name
        )

    def _seal(self) -> None:
        """Write metadata and checksums; Orbax calls this on process 0 just before the commit."""
        writing = self._names.unfinished(self._directory, self._number)
        write_content(writing, self._content)
        folder_checksums.seal(writing, self._kind)

    def _attempt(self, work: Callable[[Any], Result]) -> Result:
        """Return the result of `written`; if it fails, delete the unfinished checkpoint."""
        try:
            return written(self._directory, work)
        except InputError:
            if processes.is_first():
                unfinished = self._names.unfinished(self._directory, self._number)
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


@dataclass(frozen=True)
class _Preservation:
    """Orbax's policy of checkpoints to keep: the newest, and those with a file not by specjax."""

    directory: Path
    names: Numbered
    kept: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each of `checkpoints`, ascending by number, whether to keep it."""
        paths = [self.names.path(self.directory, checkpoint.step) for checkpoint in checkpoints]
        older = len(paths) - self.kept
        return [number >= older or _holds_more(path) for number, path in enumerate(paths)]


def _holds_more(path: Path) -> bool:
    """Return whether a folder has a file that its marker does not list.

    If the marker is missing, which an interrupted deletion may cause, all files are compared with
    the names that Orbax uses.
    """
    try:
        marker = folder_checksums.read_marker(path)
        names = [name for name in folder_checksums.contents(path) if name[-1] != "/"]
    except (InputError, OSError):
        return True
    if marker is None:
        return any(name != CONTENT and not name.startswith(f"{ARRAYS}/") for name in names)
    return any(name not in (marker.files or ()) for name in names)
