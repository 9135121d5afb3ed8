"""Arrays and metadata in an Orbax checkpoint: saved whole or not at all, restored onto any mesh.

Every process makes these calls, on a file system that all of them share; `checkpoint_directory`
defines the folders.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.distributed import processes
from specjax.errors import InputError, one_line
from specjax.files import folder_marker
from specjax.files.json_files import parse_json
from specjax.files.open_files import regular_files
from specjax.loading.checkpoint_directory import (
    Kind,
    begin,
    committed,
    damaged,
    delete_all_but_newest,
    newest,
    read_marker,
    unfinished,
)

_FORMAT = 1
_ARRAYS = "params"
_SUCCESS = "commit_success.txt"
_INDEX = ("_CHECKPOINT_METADATA", f"{_ARRAYS}/_METADATA", f"{_ARRAYS}/manifest.ocdbt")
"""The files that describe the others."""
_READERS = {"model": "specjax.load_model", "drafter": "specjax.loading.checkpoints.load_drafter"}

_CHUNK_BYTES = 64 << 20
"""Arrays are stored in chunks of this size, so that a device reads little more than its part."""
_READ_BYTES = 2 << 30
"""The most that the host holds while reading; twice the largest array where that is more."""
_WEIGHED_BYTES = 1 << 20
"""Smaller arrays may be compressed in Orbax's index; others take their full size on disk."""
_LAST_WORDS_S = 0.2
"""After this time a failed call is assumed to have no more pending reads and writes."""


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

    def check() -> dict[str, Any]:
        _check_params(directory, params)
        known = parse_json(_to_json(directory, metadata), f"{directory}: the metadata")
        return {"specjax_checkpoint": _FORMAT, "kind": kind, "metadata": known}

    envelope = processes.together(check, {"the checkpoint's directory": str(directory)})
    with ExitStack() as stack:
        # One process looks, since file systems may show the others an older listing.
        number = processes.together(
            lambda: begin(directory, kind, overwrite, stack) if processes.is_first() else 0
        )
        number = processes.from_first(number)
        path, writing = committed(directory, number), unfinished(directory, number)
        processes.together(lambda: _check_shared(writing.parent))
        if processes.count() > 1:
            params = jax.tree.map(_for_the_first, params)

        def write(ocp: Any, context: Any) -> None:
            context.array.saving.use_compression = False
            context.array.saving.enable_write_sharding_file = False
            context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
            with context:
                ocp.save(writing, params, checkpointable_name=_ARRAYS, custom_metadata=envelope)

        def commit() -> None:
            try:
                success = writing / _SUCCESS
                if success.exists():
                    # Orbax names the folder in it, which is nobody's concern elsewhere.
                    success.write_text("The checkpoint was written.\n", encoding="utf-8")
                folder_marker.seal(writing, kind)
                writing.rename(path)
            except OSError as error:
                raise _unwritable(directory, one_line(error)) from None

        try:
            _, failure = _attempt(write)
            processes.agree({}, failure and str(_unwritable(directory, failure)))
            processes.together(lambda: commit() if processes.is_first() else None)
        finally:
            if processes.is_first():
                delete_all_but_newest(directory, kind)


def look(directory: Path, kind: Kind) -> Found:
    """The metadata of a checkpoint, with the shapes and dtypes of its arrays; none of them is read.

    Raises InputError where there is no whole checkpoint of that kind and of a known format.
    """
    path = newest(directory)
    marker = read_marker(directory, path)
    regular_files(path, "copy the checkpoint again, or save elsewhere")
    if damage := folder_marker.find_damage(path, marker, share=None, needed=_INDEX):
        raise damaged(directory, f"{path.name}/{damage}")

    def read(ocp: Any, context: Any) -> Any:
        with context:
            content = ocp.metadata(path, checkpointable_name=_ARRAYS)
        # Orbax logs what went wrong and continues.
        if content.metadata is None:
            raise ValueError("its index cannot be read")
        return content

    index, failure = _attempt(read)
    if failure is not None:
        raise damaged(directory, failure)
    metadata = _open_envelope(directory, kind, index.custom_metadata)
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

    def read(ocp: Any, context: Any) -> dict[str, Any]:
        context.memory.read_concurrent_bytes = max(_READ_BYTES, 2 * largest + 1)
        with context:
            return ocp.load(found.path, wanted, checkpointable_name=_ARRAYS)

    params, failure = _attempt(read)
    processes.agree({}, failure and str(damaged(found.directory, failure)))
    return params


def shapes(tree: Any) -> Any:
    """The tree with a ShapeDtypeStruct for each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _attempt(work: Callable[[Any, Any], Any]) -> tuple[Any, str | None]:
    """(result, None) of `work`, called with Orbax and a new context, or (_, the error in one line).

    After a failure each read and write that was still pending logs an error as well, when it ends
    and when it is freed: this function waits for them and silences those messages.
    """
    # Slow to import, and needed only for checkpoints.
    from orbax.checkpoint import v1 as ocp

    failure = None
    with _silenced():
        try:
            return work(ocp, ocp.Context()), None
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # a device out of memory: the files are not at fault
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


def _check_shared(directory: Path) -> None:
    if not directory.is_dir():
        raise InputError(
            f"{directory}: made by the first process and not seen by this one; give a directory on "
            "a file system that all processes share"
        )


def _for_the_first(leaf: Any) -> Any:
    """An array that each process holds separately is written by the first, from its memory."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) and leaf.is_fully_addressable else leaf


def _unwritable(directory: Path, reason: str | None) -> InputError:
    return InputError(
        f"{directory}: the checkpoint cannot be written ({reason}); free space or save elsewhere"
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
