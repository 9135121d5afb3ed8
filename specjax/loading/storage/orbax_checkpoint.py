"""Arrays and metadata in an Orbax checkpoint, saved atomically and restored onto any mesh.

Orbax writes and reads the arrays. Added here are the metadata, the checksums
(`files.folder_checksums`) and the replacement of an earlier checkpoint. Every process must call
these functions, on a shared file system. `checkpoint_directory` describes the other files.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from specjax.distributed import processes
from specjax.errors import InputError, one_line
from specjax.files import folder_checksums, folders
from specjax.files.folder_checksums import ORBAX_SUCCESS
from specjax.loading.storage.checkpoint_directory import (
    ARRAYS,
    CONTENT,
    INDEX,
    TOKENIZER,
    Kind,
    content_text,
    damaged,
    read_marker,
    read_metadata,
)

_CHUNK_BYTES = 64 << 20
"""The chunk size of stored arrays, so that a device reads little more than its part."""
_READ_BYTES = 2 << 30
"""The most bytes that the host holds while reading, or twice the largest array if that is more."""
_WEIGHED_BYTES = 1 << 20
"""The size from which arrays take their full size on disk; Orbax may compress smaller ones."""
_LAST_WORDS_S = 0.2
"""The seconds after which a failed call is assumed to have no pending reads and writes."""

Result = TypeVar("Result")


class Found(NamedTuple):
    """A checkpoint whose metadata was read; its `arrays` are still only shapes and dtypes."""

    directory: Path
    metadata: dict[str, Any]
    arrays: dict[str, Any]


def save(
    directory: Path,
    params: dict[str, Any],
    metadata: dict[str, Any],
    overwrite: bool,
    write_more: Callable[[Path], None] = lambda new: None,
) -> None:
    """Write a nested dict of a model's arrays and its metadata as a checkpoint.

    It replaces an earlier one if `overwrite` is set. `write_more` is called on process 0 with the
    new folder, to write further files. Raises InputError if the directory has other files, cannot
    be written, or is not seen by all processes, and for parameters that are not arrays or metadata
    that is not JSON.
    """
    text = processes.together(
        lambda: content_text(directory, params, metadata),
        {"the checkpoint's directory": str(directory)},
    )
    with ExitStack() as stack:

        def begin() -> str:
            new = stack.enter_context(folders.replacing(directory, "model", overwrite=overwrite))
            # Orbax creates the folder. If it had to overwrite one, its processes might wait for
            # each other for ever: they look for the folder while process 0 deletes it.
            new.rmdir()
            return str(new)

        def end() -> None:
            write_content(new, text)
            write_more(new)
            stack.close()

        # One process looks, since file systems may show the others an older listing.
        name = processes.together(lambda: begin() if processes.is_first() else "")
        new = Path(processes.from_first(name))
        processes.together(lambda: _check_shared(new.parent, directory))

        def write(ocp: Any) -> None:
            with saving_context(ocp):
                ocp.save(new, writable(params), checkpointable_name=ARRAYS)

        written(directory, write)
        processes.together(lambda: end() if processes.is_first() else None)


def writable(params: dict[str, Any]) -> dict[str, Any]:
    """Return `params` with leaves that Orbax can save when there are several processes."""

    def for_the_first(leaf: Any) -> Any:
        """Return an array that each process has completely as NumPy's, for process 0 to write."""
        separate = isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        return np.asarray(leaf) if separate else leaf

    return params if processes.count() == 1 else jax.tree.map(for_the_first, params)


def saving_context(ocp: Any) -> Any:
    """Return Orbax's options for saving; `ocp` is Orbax's module."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    return context


def written(directory: Path, work: Callable[[Any], Result]) -> Result:
    """Return the result of `work`, called with Orbax's module; raise InputError if it fails.

    The error is raised on all processes and names `directory`.
    """
    result, failure = attempt(work)
    processes.agree(
        {},
        failure
        and f"{directory}: the checkpoint cannot be written ({failure}); free space or save "
        "elsewhere",
    )
    return result


def write_content(folder: Path, text: str) -> None:
    """Write a checkpoint's `content_text` beside its arrays, or raise OSError."""
    for path in (folder / ORBAX_SUCCESS, folder / ARRAYS / ORBAX_SUCCESS):
        path.unlink(missing_ok=True)  # they contain the path where the checkpoint was made
    (folder / CONTENT).write_text(text, encoding="utf-8")


def look(directory: Path, kind: Kind) -> Found:
    """Return the metadata of a checkpoint, and the shapes and dtypes of its arrays.

    Raises InputError if there is no complete checkpoint of that kind in a known format.
    """
    tokenizer = (f"{TOKENIZER}/{path.name}" for path in sorted((directory / TOKENIZER).glob("*")))
    metadata = read_metadata(directory, kind, (*INDEX, *tokenizer))

    def read(ocp: Any) -> Any:
        with ocp.Context():
            index = ocp.metadata(directory, checkpointable_name=ARRAYS)
        # Orbax only logs failures and continues.
        if index.metadata is None:
            raise ValueError("its index cannot be read")
        return index.metadata

    arrays, failure = attempt(read)
    if failure is not None:
        raise damaged(directory, failure)
    leaves = jax.tree.leaves(arrays)
    named = isinstance(arrays, dict) and leaves
    if not named or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise damaged(directory, "its index lists more than arrays")
    found = Found(directory, metadata, shapes(arrays))
    _weigh(found)
    return found


def verify(found: Found) -> None:
    """Raise InputError, naming the file, if a file of a checkpoint changed since it was saved.

    Each process reads a share of the files.
    """

    def check() -> None:
        share = processes.number(), processes.count()
        marker = read_marker(found.directory)
        if damage := folder_checksums.find_damage(found.directory, marker, share):
            raise damaged(found.directory, damage)

    processes.together(check)


def restore(found: Found, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays with the dtypes and shardings of `wanted`; each device reads its part.

    `wanted` is a tree of ShapeDtypeStruct. Raises InputError if an array cannot be read; use
    `verify` to check that files are unchanged.
    """
    pairs = zip(jax.tree.leaves(found.arrays), jax.tree.leaves(wanted), strict=True)
    largest = max(a.size * max(a.dtype.itemsize, b.dtype.itemsize) for a, b in pairs)

    def read(ocp: Any) -> dict[str, Any]:
        context = ocp.Context()
        context.memory.read_concurrent_bytes = max(_READ_BYTES, 2 * largest + 1)
        with context:
            return ocp.load(found.directory, wanted, checkpointable_name=ARRAYS)

    params, failure = attempt(read)
    processes.agree({}, failure and str(damaged(found.directory, failure)))
    return params


def shapes(tree: Any) -> Any:
    """Return a tree of arrays as a tree of ShapeDtypeStruct."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def attempt(work: Callable[[Any], Result]) -> tuple[Result | None, str | None]:
    """Return (result, None), or (None, message) if `work` raised; message is one line of text.

    `work` is called with Orbax's module. MemoryError and JaxRuntimeError, which say that a device
    lacks memory, are raised again. Orbax's pending reads and writes log further errors after a
    failure; this function waits for them and silences them.
    """
    # Slow to import, and needed only for checkpoints.
    from orbax.checkpoint import v1 as ocp

    failure = None
    with silenced():
        try:
            return work(ocp), None
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # a device out of memory: the files are not at fault
        except Exception as error:  # what Orbax and TensorStore raise has no base class
            failure = f"{one_line(error):.160}"
        time.sleep(_LAST_WORDS_S)
        gc.collect()
    return None, failure


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress, in the context, Orbax's logs and Python's messages about unraisable errors.

    What they report is also raised as an exception.
    """
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


def _check_shared(work: Path, directory: Path) -> None:
    if not work.is_dir():
        raise InputError(
            f"{directory}: made by the first process and not seen by this one; give a directory on "
            "a file system that all processes share"
        )


def _weigh(found: Found) -> None:
    """Raise InputError if the files are too small for the arrays that the index lists."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(found.arrays)]
    needed = sum(size for size in sizes if size >= _WEIGHED_BYTES)
    files = (found.directory / ARRAYS).rglob("*")
    existing = sum(path.stat().st_size for path in files if path.is_file())
    if existing < needed:
        raise damaged(found.directory, f"{existing} bytes are there, its arrays take {needed}")
