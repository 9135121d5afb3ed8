"""Arrays and metadata in an Orbax directory: saved whole or not at all, restored onto any mesh.

The directory holds one Orbax checkpoint, `specjax-1`, with the marker of `files.folders`, which
lists its files. A save over it writes into `specjax-2.unfinished`, from where the checkpoint is
moved once it has its marker, and deletes the earlier one afterwards: wherever a save dies, a whole
checkpoint is left, and the next save clears away what was not finished.
Every process makes these calls, on a file system that all of them see.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.distributed import processes
from specjax.errors import InputError, one_line
from specjax.files import folders, temporary
from specjax.files.json_files import parse_json
from specjax.files.open_files import regular_files

Kind = Literal["model", "drafter"]

_FORMAT = 1
_ARRAYS = "params"
_NAME = "specjax-{}"
_UNFINISHED = ".unfinished"
_OURS = re.compile(rf"specjax-([1-9]\d*)({re.escape(_UNFINISHED)})?", re.ASCII)
"""A checkpoint's name, or that of the folder in which it is written."""
_INDEX = ("_CHECKPOINT_METADATA", f"{_ARRAYS}/_METADATA", f"{_ARRAYS}/manifest.ocdbt")
"""The files that say what the others hold."""
_READERS = {"model": "specjax.load_model", "drafter": "specjax.loading.checkpoints.load_drafter"}

_CHUNK_BYTES = 64 << 20
"""Arrays are stored in pieces of this size, so that a device reads little more than its part."""
_READ_BYTES = 2 << 30
"""The most that the host holds while reading; twice the largest array where that is more."""
_WEIGHED_BYTES = 1 << 20
"""Smaller arrays may lie compressed in Orbax's index; others take their full size on disk."""
_LAST_WORDS_S = 0.2
"""After this time a failed call is taken to have no more pending reads and writes."""


class Found(NamedTuple):
    """A checkpoint whose metadata and index were read: `arrays` are shapes and dtypes so far."""

    directory: Path
    path: Path
    metadata: dict[str, Any]
    arrays: dict[str, Any]


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of ours, or what an interrupted save has left."""
    if not directory.is_dir() or (directory / "config.json").exists():
        return False
    return any(_OURS.fullmatch(name) for name in _names(directory))


def save(
    directory: Path, kind: Kind, params: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    """Write a nested dict of arrays and its metadata, replacing an earlier checkpoint if asked.

    Raises InputError where the directory holds anything else, cannot be written, or is not seen by
    all processes, for parameters that are not arrays and metadata that JSON does not know.
    """

    def check() -> dict[str, Any]:
        _check_params(directory, params)
        known = parse_json(_to_json(directory, metadata), f"{directory}: the metadata")
        return {"specjax_checkpoint": _FORMAT, "kind": kind, "metadata": known}

    envelope = processes.together(check, {"the checkpoint's directory": str(directory)})
    with ExitStack() as stack:
        # One process looks, since file systems may show the others an older listing.
        number = processes.together(
            lambda: _begin(directory, kind, overwrite, stack) if processes.speaks() else 0
        )
        number = processes.from_first(number)
        path = directory / _NAME.format(number)
        unfinished = temporary.path_of(directory, path.name + _UNFINISHED)
        processes.together(lambda: _check_shared(unfinished.parent))
        if processes.count() > 1:
            params = jax.tree.map(_for_the_first, params)

        def write(ocp: Any, context: Any) -> None:
            context.array.saving.use_compression = False
            context.array.saving.enable_write_sharding_file = False
            context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
            with context:
                ocp.save(unfinished, params, checkpointable_name=_ARRAYS, custom_metadata=envelope)

        def commit() -> None:
            try:
                folders.seal(unfinished, kind)
                unfinished.rename(path)
            except OSError as error:
                raise _unwritable(directory, one_line(error)) from None

        try:
            _, failure = _attempt(write)
            processes.agree({}, failure and str(_unwritable(directory, failure)))
            processes.together(lambda: commit() if processes.speaks() else None)
        finally:
            if processes.speaks():
                _delete_all_but_newest(directory, kind)


def look(directory: Path, kind: Kind) -> Found:
    """The metadata of a checkpoint, with the shapes and dtypes of its arrays; none of them is read.

    Raises InputError where there is no whole checkpoint of that kind and of a known format.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give one that specjax saved")
    if not (numbers := _numbers(directory)):
        if is_checkpoint(directory):
            raise InputError(
                f"{directory}: the only save into it was interrupted, nothing is whole; save again"
            )
        raise InputError(f"{directory}: holds no checkpoint; give a directory that specjax saved")
    path = directory / _NAME.format(numbers[-1])
    marker = _marker(directory, path)
    regular_files(path, "copy the checkpoint again, or save elsewhere")
    if damage := folders.find_damage(path, marker, share=None, needed=_INDEX):
        raise damaged(directory, f"{path.name}/{damage}")

    def read(ocp: Any, context: Any) -> Any:
        with context:
            content = ocp.metadata(path, checkpointable_name=_ARRAYS)
        # Orbax logs what went wrong and goes on.
        if content.metadata is None:
            raise ValueError("its index cannot be read")
        return content

    index, failure = _attempt(read)
    if failure is not None:
        raise damaged(directory, failure)
    metadata = _open_envelope(directory, kind, index.custom_metadata)
    if marker.kind != kind:
        raise damaged(directory, f"{path.name}/{folders.MARKER} is of a {marker.kind}")
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
        marker = _marker(found.directory, found.path)
        share = processes.number(), processes.count()
        if damage := folders.find_damage(found.path, marker, share):
            raise damaged(found.directory, f"{found.path.name}/{damage}")

    processes.together(check)


def restore(found: Found, wanted: dict[str, Any]) -> dict[str, Any]:
    """The arrays in the dtypes and shardings of `wanted`, each device reading its own part.

    `wanted` is a tree of ShapeDtypeStruct. Raises InputError where an array cannot be read; that
    the files are those that were saved is for `verify` to say.
    """
    pairs = zip(jax.tree.leaves(found.arrays), jax.tree.leaves(wanted), strict=True)
    largest = max(a.size * max(a.dtype.itemsize, b.dtype.itemsize) for a, b in pairs)

    def read(ocp: Any, context: Any) -> dict[str, Any]:
        context.memory.read_concurrent_bytes = max(_READ_BYTES, 2 * largest + 1)
        with context:
            return ocp.load(found.path, wanted, checkpointable_name=_ARRAYS)

    params, failure = _attempt(read)
    processes.agree({}, failure and str(damaged(found.directory, failure)))
    return params


def damaged(directory: Path, how: str) -> InputError:
    """The error for a checkpoint that is not what was saved."""
    return InputError(
        f"{directory}: the checkpoint is damaged or truncated ({how}); copy it again, or save "
        "elsewhere"
    )


def shapes(tree: Any) -> Any:
    """The tree with a ShapeDtypeStruct for each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _attempt(work: Callable[[Any, Any], Any]) -> tuple[Any, str | None]:
    """What `work` gives for Orbax and a context of its own, or in a line what went wrong.

    After a failure each read and write that was still pending complains as well, in the log, when
    it ends and when it is freed: they do so here, and unheard.
    """
    # Slow to import, and of no use to who saves nothing.
    from orbax.checkpoint import v1 as ocp

    failure = None
    with _silenced():
        try:
            return work(ocp, ocp.Context()), None
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # a device that is full is no fault of the files
        except Exception as error:  # what Orbax and TensorStore raise has no base class
            failure = _brief(error)
        time.sleep(_LAST_WORDS_S)
        gc.collect()
    return None, failure


@contextmanager
def _silenced() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    for logger in loggers:
        logger.addFilter(_never)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_never)
        sys.unraisablehook = hook


def _never(record: logging.LogRecord) -> bool:
    return False


def _brief(error: Exception, limit: int = 160) -> str:
    text = one_line(error)
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise InputError(f"{directory}: cannot be read ({error.strerror or error})") from None


def _numbers(directory: Path) -> list[int]:
    """The numbers of the checkpoints that were committed, in order."""
    found = (_OURS.fullmatch(name) for name in _names(directory))
    return sorted(int(match[1]) for match in found if match and not match[2])


def _check_params(directory: Path, params: dict[str, Any]) -> None:
    def check(name: str, node: Any) -> None:
        if isinstance(node, dict) and node:
            for key, child in node.items():
                # Orbax joins names by dots, and writes them as UTF-8.
                if not isinstance(key, str) or not key or "." in key or not _is_unicode(key):
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


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _to_json(directory: Path, metadata: dict[str, Any]) -> str:
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{directory}: the metadata are not JSON ({_brief(error)}); use dicts, lists, text, "
            "finite numbers, true, false and null"
        ) from None
    return text


def check_free(directory: Path, kind: Kind, overwrite: bool, where: str | None = None) -> None:
    """Raise InputError where `save` would: a directory that holds anything else than `save` wrote.

    A checkpoint that is there is an error unless it is to be replaced, and then too where it is of
    another kind, was changed, or holds a file that `save` did not write. `where` begins the
    message, the path if it is left out.
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
            marker = folders.read_marker(path)
        except InputError:
            marker = None
        # What lacks a marker that can be read is not ours to delete, and stays.
        if marker is not None:
            folders.check_replaceable(path, kind, str(path))


def _is_unfinished(path: Path, kind: Kind) -> bool:
    return temporary.is_unfinished(path, f"{kind} {path.name}")


def _begin(directory: Path, kind: Kind, overwrite: bool, stack: ExitStack) -> int:
    """The number of a new save, whose folder is made; it is deleted at the end of the context."""
    try:
        check_free(directory, kind, overwrite)
        directory.mkdir(parents=True, exist_ok=True)
        matches = (_OURS.fullmatch(name) for name in _names(directory))
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        while True:
            name = _NAME.format(number) + _UNFINISHED
            try:
                stack.enter_context(temporary.unfinished(directory, f"{kind} {name}", name))
            except FileExistsError:  # another save was faster
                number += 1
                continue
            return number
    except OSError as error:
        raise InputError(f"{directory}: cannot be written ({error.strerror or error})") from None


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise InputError(
            f"{directory}: made by the first process and not seen by this one; give a directory on "
            "a file system that all processes share"
        )


def _for_the_first(leaf: Any) -> Any:
    """An array that each process has for itself is written by one, from its memory."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and leaf.is_fully_addressable else leaf


def _delete_all_but_newest(directory: Path, kind: Kind) -> None:
    with suppress(InputError, OSError):
        _delete_checkpoints(directory, kind, keep=max(_numbers(directory), default=0))


def delete(directory: Path, kind: Kind) -> None:
    """Delete a directory's checkpoints of a kind, and itself if nothing else is in it."""
    with suppress(InputError, OSError):
        _delete_checkpoints(directory, kind, keep=None)
        directory.rmdir()


def _delete_checkpoints(directory: Path, kind: Kind, keep: int | None) -> None:
    for name in _names(directory):
        match = _OURS.fullmatch(name)
        if match and match[2]:
            # Taking one deletes it.
            list(temporary.left_behind(directory, f"{kind} {name}", name.__eq__))
        elif match and int(match[1]) != keep:
            with suppress(InputError):
                marker = folders.read_marker(directory / name)
                if marker is not None and marker.kind == kind:
                    folders.delete(directory / name)


def _marker(directory: Path, path: Path) -> folders.Marker:
    """The marker of a checkpoint, which it has got last."""
    try:
        marker = folders.read_marker(path)
    except InputError as error:
        raise damaged(directory, str(error)) from None
    if marker is None or marker.files is None:
        raise InputError(
            f"{directory}: {path.name} lacks its commit marker, {folders.MARKER}: not saved by "
            "specjax, or damaged; copy it again, whole, or save elsewhere"
        )
    return marker


def _unwritable(directory: Path, reason: str | None) -> InputError:
    return InputError(
        f"{directory}: the checkpoint cannot be written ({reason}); make room or save elsewhere"
    )


def _open_envelope(directory: Path, kind: Kind, envelope: Any) -> dict[str, Any]:
    # Orbax gives nothing both where nothing was saved and where the file cannot be parsed.
    if not isinstance(envelope, dict) or "specjax_checkpoint" not in envelope:
        raise InputError(
            f"{directory}: not saved by specjax, or damaged; give a whole checkpoint of specjax"
        )
    version, held = envelope["specjax_checkpoint"], envelope.get("kind")
    if type(version) is not int or version != _FORMAT:
        raise InputError(
            f"{directory}: checkpoint format {version!r:.40}, and only {_FORMAT} is known; "
            "use the version of specjax that saved it"
        )
    metadata = envelope.get("metadata")
    if not isinstance(held, str) or held not in _READERS or not isinstance(metadata, dict):
        raise damaged(directory, "its kind or its metadata are missing")
    if held != kind:
        raise InputError(
            f"{directory}: holds a {held}, not a {kind}; give another directory, or read it with "
            f"{_READERS[held]}"
        )
    _to_json(directory, metadata)
    return metadata


def _weigh(found: Found) -> None:
    """Raise InputError where the files are too small for the arrays that the index promises."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found.arrays)]
    needed = sum(size for size in sizes if size >= _WEIGHED_BYTES)
    files = (found.path / _ARRAYS).rglob("*")
    there = sum(path.stat().st_size for path in files if path.is_file())
    if there < needed:
        raise damaged(found.directory, f"{there} bytes are there, its arrays take {needed}")
