"""Numbered checkpoints of a run, written in the background; only the newest are kept.

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
"""What Orbax appends to the name of a folder while it writes it."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Numbered:
    """Folder names made of a prefix and a number, zero-padded to `digits` digits.

    The methods with `step` implement Orbax's `NameFormat`.
    """

    prefix: str
    digits: int = 1

    def path(self, directory: Path, number: int) -> Path:
        """Return the folder of a checkpoint."""
        return directory / self.build_name(number)

    def unfinished(self, directory: Path, number: int) -> Path:
        """Return the temporary folder in which Orbax writes a checkpoint."""
        return directory / (self.build_name(number) + _UNFINISHED)

    def all_unfinished(self, directory: Path) -> list[Path]:
        """Return the temporary folders of interrupted writes."""
        numbers = self._found(directory, _UNFINISHED)
        return [self.unfinished(directory, number) for number in numbers]

    def numbers(self, directory: Path) -> list[int]:
        """Return the numbers of the finished folders, in order."""
        return self._found(directory, "")

    def _found(self, directory: Path, suffix: str) -> list[int]:
        pattern = re.compile(rf"{self.prefix}-(\d{{{self.digits},}}){re.escape(suffix)}", re.ASCII)
        try:
            names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
        except OSError as error:
            raise InputError(f"{directory}: cannot be read ({error.strerror or error})") from None
        return sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)

    def build_name(self, step: int) -> str:
        """Return the name of a folder."""
        return f"{self.prefix}-{step:0{self.digits}d}"

    def find_step(self, base_path: Any, step: int) -> Any:
        """Return Orbax's metadata of an existing folder."""
        # Slow to import, and needed only for saving.
        from orbax.checkpoint.path import step as orbax_step

        return orbax_step.Metadata(step=step, path=base_path / self.build_name(step))

    def find_all(self, base_path: Any) -> list[Any]:
        """Return Orbax's metadata of all existing folders."""
        return [self.find_step(base_path, step) for step in self.numbers(Path(base_path))]


class Saver:
    """A context that saves numbered checkpoints of one kind into a directory, in the background.

    It keeps the newest `kept` checkpoints, and all that contain a file which specjax did not write.
    A directory may be used by one process (or one group of connected processes) at a time. Leaving
    the context waits for the last save. All errors are InputErrors of one line.
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
                if kind is None:  # else that error is the one to report
                    self.wait()
            finally:
                attempt(lambda ocp: self._manager.close())

    def save(self, number: int, params: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Start to write a nested dict of arrays and JSON-ready metadata, after the previous save.

        The arrays are copied first, and may be donated afterwards. Raises InputError as
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
        """Delete the folders of saves that were killed, but for those with a file of others."""
        for path in self._names.all_unfinished(self._directory):
            with suppress(OSError):
                if not _holds_more(path):
                    shutil.rmtree(path)

    def _open(self, ocp: Any) -> None:
        if processes.is_first():
            self._delete_unfinished()
        context = saving_context(ocp)
        # Orbax copies its options deeply: a function is not copied, the object of a method is.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        self._manager = ocp.training.Checkpointer(
            self._directory,
            context=context,
            step_name_format=self._names,
            preservation_policy=_Preservation(self._directory, self._names, self._kept),
            cleanup_tmp_directories=False,  # it would take any folder of such a name
        )

    def _seal(self) -> None:
        """Called by Orbax, on the first process, when everything but the commit is done."""
        writing = self._names.unfinished(self._directory, self._number)
        write_content(writing, self._content)
        folder_checksums.seal(writing, self._kind)

    def _attempt(self, work: Callable[[Any], Result]) -> Result:
        """Return as `written`; what a failure left of the latest checkpoint is deleted."""
        try:
            return written(self._directory, work)
        except InputError:
            if processes.is_first():
                unfinished = self._names.unfinished(self._directory, self._number)
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


@dataclass(frozen=True)
class _Preservation:
    """Which checkpoints Orbax keeps: the newest, and those with a file that is not specjax's."""

    directory: Path
    names: Numbered
    kept: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint, ascending by number, whether to keep it."""
        paths = [self.names.path(self.directory, checkpoint.step) for checkpoint in checkpoints]
        older = len(paths) - self.kept
        return [number >= older or _holds_more(path) for number, path in enumerate(paths)]


def _holds_more(path: Path) -> bool:
    """Return whether a folder holds a file that its marker does not list.

    Without a marker, which a deletion that was interrupted may leave, the names of Orbax's files
    are known.
    """
    try:
        marker = folder_checksums.read_marker(path)
        names = [name for name in folder_checksums.contents(path) if name[-1] != "/"]
    except (InputError, OSError):
        return True
    if marker is None:
        return any(name != CONTENT and not name.startswith(f"{ARRAYS}/") for name in names)
    return any(name not in (marker.files or ()) for name in names)
