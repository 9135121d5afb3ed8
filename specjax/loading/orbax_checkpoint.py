"""Arrays and metadata in an Orbax checkpoint: saved whole or not at all, restored onto any mesh.

Orbax's manager of checkpoints writes, commits and deletes them; added here is the list of checksums
(`files.folder_marker`), written just before it commits, and that no folder with a user's file is
deleted. Every process makes these calls, on a file system that all of them share;
`checkpoint_directory` defines the folders.
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.distributed import processes
from specjax.errors import InputError, one_line
from specjax.files import atomic_writes, folder_marker
from specjax.files.folder_marker import ORBAX_METADATA, ORBAX_SUCCESS
from specjax.files.json_files import parse_json, read_json_file
from specjax.files.open_files import regular_files
from specjax.loading.checkpoint_directory import (
    CONTENT,
    SAVES,
    Kind,
    Numbered,
    check_free,
    damaged,
    newest,
    read_marker,
)

_FORMAT = 1
_ARRAYS = "params"
_INDEX = (f"{_ARRAYS}/_METADATA", f"{_ARRAYS}/manifest.ocdbt")
"""The files that describe the arrays."""
_READERS = {"model": "specjax.load_model", "drafter": "specjax.loading.checkpoints.load_drafter"}

_CHUNK_BYTES = 64 << 20
"""Arrays are stored in chunks of this size, so that a device reads little more than its part."""
_READ_BYTES = 2 << 30
"""The most that the host holds while reading; twice the largest array where that is more."""
_WEIGHED_BYTES = 1 << 20
"""Smaller arrays may be compressed in Orbax's index; others take their full size on disk."""
_LAST_WORDS_S = 0.2
"""After this time a failed call is assumed to have no more pending reads and writes."""

Result = TypeVar("Result")


class Found(NamedTuple):
    """A checkpoint whose metadata and index were read: `arrays` are shapes and dtypes so far."""

    directory: Path
    path: Path
    metadata: dict[str, Any]
    arrays: dict[str, Any]


def save(
    directory: Path, kind: Kind, params: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    """Write a nested dict of arrays and its metadata, replacing an earlier checkpoint if asked.

    Raises InputError where the directory holds anything else, cannot be written, or is not seen by
    all processes, for parameters that are not arrays and metadata that are not JSON.
    """
    processes.together(
        lambda: _content(directory, kind, params, metadata),
        {"the checkpoint's directory": str(directory)},
    )

    def begin(stack: ExitStack) -> int:
        try:
            check_free(directory, kind, overwrite)
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(atomic_writes.exclusive(directory, "checkpoint"))
        except OSError as error:
            raise InputError(
                f"{directory}: cannot be written ({error.strerror or error})"
            ) from None
        return max(SAVES.numbers(directory), default=0) + 1

    with ExitStack() as stack:
        # One process looks, since file systems may show the others an older listing.
        number = processes.together(lambda: begin(stack) if processes.is_first() else 0)
        number = processes.from_first(number)
        processes.together(lambda: _check_shared(directory))
        with Saver(directory, kind, SAVES, kept=1) as saver:
            saver.save(number, params, metadata)
        if processes.is_first():
            with suppress(OSError):  # it says where the checkpoint was made
                (SAVES.path(directory, number) / ORBAX_SUCCESS).unlink()


class Saver:
    """Saves numbered checkpoints of one kind into a directory, each while its caller continues.

    The newest `kept` are kept, and all that hold a file which specjax did not write. One process
    (of those that run together) uses a directory at a time. The end of the context waits for the
    last save; its errors are InputErrors of one line, as those of the methods are.
    """

    def __init__(self, directory: Path, kind: Kind, names: Numbered, kept: int) -> None:
        self._directory, self._kind, self._names, self._kept = directory, kind, names, kept
        self._number, self._content = 0, ""
        self._pending: Any = None

    def __enter__(self) -> Saver:
        with ExitStack() as stack:
            stack.enter_context(_silenced())
            self._attempt(self._open)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        with self._stack:
            try:
                if kind is None:  # else that error is the one to report
                    self.wait()
            finally:
                _attempt(lambda ocp: self._manager.close())

    def save(self, number: int, params: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Begin to write a nested dict of arrays and JSON-ready metadata, the last save being done.

        The arrays are copied first, and may be donated afterwards. Raises InputError as `save`.
        """
        content = processes.together(
            lambda: _content(self._directory, self._kind, params, metadata)
        )
        self.wait()
        self._number, self._content = number, content
        if processes.count() > 1:
            params = jax.tree.map(_for_the_first, params)
        self._pending = self._attempt(
            lambda ocp: self._manager.save_async(
                number, params, checkpointable_name=_ARRAYS, force=True
            )
        )

    def wait(self) -> None:
        """Wait until what was saved is on disk; raises InputError where that failed."""
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
        context = ocp.Context()
        context.array.saving.use_compression = False
        context.array.saving.enable_write_sharding_file = False
        context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
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
        # Orbax names the folder in it, which is nobody's concern elsewhere.
        (writing / _ARRAYS / ORBAX_SUCCESS).unlink(missing_ok=True)
        (writing / CONTENT).write_text(self._content, encoding="utf-8")
        folder_marker.seal(writing, self._kind)

    def _attempt(self, work: Callable[[Any], Result]) -> Result:
        """The result of `work`; raises InputError, on all processes, where it fails on one."""
        result, failure = _attempt(work)
        if failure is not None and processes.is_first():
            unfinished = self._names.unfinished(self._directory, self._number)
            shutil.rmtree(unfinished, ignore_errors=True)
        processes.agree(
            {},
            failure
            and f"{self._directory}: the checkpoint cannot be written ({failure}); free space or "
            "save elsewhere",
        )
        return result


@dataclass(frozen=True)
class _Preservation:
    """Which checkpoints Orbax keeps: the newest, and those with a file that is not specjax's."""

    directory: Path
    names: Numbered
    kept: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint, ascending by number, whether it is kept."""
        paths = [self.names.path(self.directory, checkpoint.step) for checkpoint in checkpoints]
        older = len(paths) - self.kept
        return [number >= older or _holds_more(path) for number, path in enumerate(paths)]


def _holds_more(path: Path) -> bool:
    """Whether a folder holds a file that its marker does not list.

    Without a marker, which a deletion that was interrupted may leave, the names of Orbax's files
    are known.
    """
    try:
        marker = folder_marker.read_marker(path)
        names = [name for name in folder_marker.contents(path) if name[-1] != "/"]
    except (InputError, OSError):
        return True
    if marker is None:
        return any(name != CONTENT and not name.startswith(f"{_ARRAYS}/") for name in names)
    return any(name not in (marker.files or ()) for name in names)


def look(directory: Path, kind: Kind) -> Found:
    """The metadata of a checkpoint, with the shapes and dtypes of its arrays; none of them is read.

    Raises InputError where there is no whole checkpoint of that kind and of a known format.
    """
    path = newest(directory)
    marker = read_marker(directory, path)
    remedy = "copy the checkpoint again, or save elsewhere"
    regular_files(path, remedy)
    by_orbax = CONTENT not in marker.files  # saved by an earlier version
    needed = (ORBAX_METADATA if by_orbax else CONTENT, *_INDEX)
    if damage := folder_marker.find_damage(path, marker, share=None, needed=needed):
        raise damaged(directory, f"{path.name}/{damage}")

    def read(ocp: Any) -> Any:
        with ocp.Context():
            index = ocp.metadata(path, checkpointable_name=_ARRAYS)
        # Orbax logs what went wrong and continues.
        if index.metadata is None:
            raise ValueError("its index cannot be read")
        return index

    index, failure = _attempt(read)
    if failure is not None:
        raise damaged(directory, failure)
    content = index.custom_metadata if by_orbax else read_json_file(path / CONTENT, remedy)
    metadata = _metadata(directory, kind, content)
    if marker.kind != kind:
        raise damaged(directory, f"{path.name}/{folder_marker.MARKER} is of a {marker.kind}")
    arrays = index.metadata
    leaves = jax.tree.leaves(arrays)
    named = isinstance(arrays, dict) and leaves
    if not named or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise damaged(directory, "its index lists more than arrays")
    found = Found(directory, path, metadata, shapes(arrays))
    _weigh(found)
    return found


def verify(found: Found) -> None:
    """Raise InputError, naming the file, unless all files of a checkpoint are as they were saved.

    Each process reads its share of them.
    """

    def check() -> None:
        marker = read_marker(found.directory, found.path)
        share = processes.number(), processes.count()
        if damage := folder_marker.find_damage(found.path, marker, share):
            raise damaged(found.directory, f"{found.path.name}/{damage}")

    processes.together(check)


def restore(found: Found, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arrays in the dtypes and shardings of `wanted`, each device reading its own part.

    `wanted` is a tree of ShapeDtypeStruct. Raises InputError where an array cannot be read; it does
    not check that files are unchanged, which `verify` does.
    """
    pairs = zip(jax.tree.leaves(found.arrays), jax.tree.leaves(wanted), strict=True)
    largest = max(a.size * max(a.dtype.itemsize, b.dtype.itemsize) for a, b in pairs)

    def read(ocp: Any) -> dict[str, Any]:
        context = ocp.Context()
        context.memory.read_concurrent_bytes = max(_READ_BYTES, 2 * largest + 1)
        with context:
            return ocp.load(found.path, wanted, checkpointable_name=_ARRAYS)

    params, failure = _attempt(read)
    processes.agree({}, failure and str(damaged(found.directory, failure)))
    return params


def shapes(tree: Any) -> Any:
    """The tree with a ShapeDtypeStruct for each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _attempt(work: Callable[[Any], Result]) -> tuple[Result | None, str | None]:
    """(result, None) of `work`, called with Orbax, or (None, the error in one line).

    After a failure each read and write that was still pending logs an error as well, when it ends
    and when it is freed: this function waits for them and silences those messages.
    """
    # Slow to import, and needed only for checkpoints.
    from orbax.checkpoint import v1 as ocp

    failure = None
    with _silenced():
        try:
            return work(ocp), None
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # a device out of memory: the files are not at fault
        except Exception as error:  # what Orbax and TensorStore raise has no base class
            failure = _brief(error)
        time.sleep(_LAST_WORDS_S)
        gc.collect()
    return None, failure


@contextmanager
def _silenced() -> Iterator[None]:
    """Without what Orbax logs and Python says of failures: they are raised as well."""
    hook, never = sys.unraisablehook, lambda record: False
    sys.unraisablehook = lambda _: None
    with ExitStack() as stack:
        stack.callback(setattr, sys, "unraisablehook", hook)
        for logger in map(logging.getLogger, ("absl", "asyncio")):
            logger.addFilter(never)
            stack.callback(logger.removeFilter, never)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield


def _brief(error: Exception, limit: int = 160) -> str:
    text = one_line(error)
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _content(directory: Path, kind: Kind, params: dict[str, Any], metadata: dict[str, Any]) -> str:
    """What is written beside the arrays; raises InputError for what cannot be saved."""
    _check_params(directory, params)
    try:
        content = {"specjax_checkpoint": _FORMAT, "kind": kind, "metadata": metadata}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{directory}: the metadata are not JSON ({_brief(error)}); use dicts, lists, text, "
            "finite numbers, true, false and null"
        ) from None
    parse_json(text, f"{directory}: the metadata")
    return text + "\n"


def _check_params(directory: Path, params: dict[str, Any]) -> None:
    def check(name: str, node: Any) -> None:
        if isinstance(node, dict) and node:
            for key, child in node.items():
                # Orbax joins names by dots.
                if not isinstance(key, str) or not key or "." in key:
                    raise InputError(
                        f"{directory}: {key!r} in {name}: parameters are named by text without "
                        "dots; rename it"
                    )
                check(f"{name}.{key}", child)
            return
        plain = isinstance(node, jax.Array | np.ndarray) and node.size
        if not plain or not (jnp.issubdtype(node.dtype, jnp.number) or node.dtype == bool):
            raise InputError(
                f"{directory}: {name} is {type(node).__name__}{list(np.shape(node))}: a checkpoint "
                "holds a nested dict of arrays of numbers, none empty; put others into the metadata"
            )

    check("params", params)


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise InputError(
            f"{directory}: made by the first process and not seen by this one; give a directory on "
            "a file system that all processes share"
        )


def _for_the_first(leaf: Any) -> Any:
    """An array that each process holds separately is written by the first, from its memory."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and leaf.is_fully_addressable else leaf


def _metadata(directory: Path, kind: Kind, content: Any) -> dict[str, Any]:
    """The metadata in what was written beside the arrays; raises InputError for anything else."""
    # Orbax gives nothing both where nothing was saved and where the file cannot be parsed.
    if not isinstance(content, dict) or "specjax_checkpoint" not in content:
        raise InputError(
            f"{directory}: not saved by specjax, or damaged; give a whole checkpoint of specjax"
        )
    version, held = content["specjax_checkpoint"], content.get("kind")
    if type(version) is not int or version != _FORMAT:
        raise InputError(
            f"{directory}: checkpoint format {version!r:.40}, and only {_FORMAT} is known; "
            "use the version of specjax that saved it"
        )
    metadata = content.get("metadata")
    if not isinstance(held, str) or held not in _READERS or not isinstance(metadata, dict):
        raise damaged(directory, "its kind or its metadata are missing")
    if held != kind:
        raise InputError(
            f"{directory}: holds a {held}, not a {kind}; give another directory, or read it with "
            f"{_READERS[held]}"
        )
    return metadata


def _weigh(found: Found) -> None:
    """Raise InputError where the files are too small for the arrays that the index promises."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found.arrays)]
    needed = sum(size for size in sizes if size >= _WEIGHED_BYTES)
    files = (found.path / _ARRAYS).rglob("*")
    there = sum(path.stat().st_size for path in files if path.is_file())
    if there < needed:
        raise damaged(found.directory, f"{there} bytes are there, its arrays take {needed}")
