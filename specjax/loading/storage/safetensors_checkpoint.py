"""The checkpoint of a drafter: its arrays in a safetensors file, with the metadata beside it.

Names of nested arrays are joined by dots. Every process must call these functions; the first one
writes. `checkpoint_directory` describes the other files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.fields import nested
from specjax.files import folders
from specjax.loading.compare_arrays import leaf_name
from specjax.loading.formats.safetensors_files import WEIGHTS, open_file, write_tensors
from specjax.loading.storage.checkpoint_directory import (
    CONTENT,
    REMEDY,
    content_text,
    damaged,
    read_metadata,
)

_DTYPES = {
    **{"BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"C64": "complex64"},
}
"""The types of tensors that safetensors reads into NumPy's arrays, and their dtypes."""


def save(
    directory: Path, params: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    """Write a nested dict of arrays and its JSON metadata, atomically.

    An earlier checkpoint of a drafter is replaced if `overwrite` is set. Raises InputError if the
    directory has other files or cannot be written, for parameters that are not arrays of a dtype
    that safetensors have, and for metadata that is not JSON.
    """

    def check() -> str:
        text = content_text(directory, params, metadata)
        for name, leaf in _by_name(params).items():
            if leaf.dtype.name not in _DTYPES.values():
                raise InputError(
                    f"{directory}: {name} is {leaf.dtype.name}, which cannot be stored; "
                    f"use {', '.join(_DTYPES.values())}"
                )
        return text

    def write() -> None:
        with folders.replacing(directory, "drafter", overwrite=overwrite) as new:
            write_tensors(arrays, new / WEIGHTS, {})
            (new / CONTENT).write_text(text, encoding="utf-8")

    text = processes.together(check, {"the checkpoint's directory": str(directory)})
    arrays = {name: _whole(leaf) for name, leaf in _by_name(params).items()}
    processes.together(lambda: write() if processes.is_first() else None)


def load(directory: Path, sharding: Sharding) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays, placed by `sharding`, and the metadata of a drafter's checkpoint.

    Raises InputError for a directory that is not a drafter's checkpoint, or that changed since it
    was saved.
    """

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        metadata = read_metadata(directory, "drafter", (WEIGHTS,), (0, 1))
        return _read_arrays(directory, sharding), metadata

    return processes.together(read)


def _read_arrays(directory: Path, sharding: Sharding) -> dict[str, Any]:
    arrays = {}
    with open_file(directory / WEIGHTS, REMEDY) as file:
        for name in sorted(file.keys()):
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise damaged(directory, f"{name} is of the type {dtype}")
            arrays[name] = _placed(file.get_tensor(name), sharding)
    if not arrays:
        raise damaged(directory, f"{WEIGHTS} holds no arrays")
    try:
        return nested(arrays)
    except ValueError as error:
        raise damaged(directory, str(error)) from None


def _placed(array: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _whole(leaf: Any) -> np.ndarray:
    """Return an array of which other processes may have parts, as NumPy's."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _by_name(params: dict[str, Any]) -> dict[str, Any]:
    return {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
