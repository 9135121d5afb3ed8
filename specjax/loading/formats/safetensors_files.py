"""Safetensors files of a directory: finding, opening, and checking their headers by the index."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.errors import InputError, one_line, shown
from specjax.files.atomic_writes import set_usual_mode
from specjax.files.open_files import regular_file
from specjax.loading.tokenizers.huggingface_tokenizer import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of weight files that can run code when they are loaded."""

FLOATS, HALVES = ("F32", "F16", "BF16", "F64"), ("F16", "BF16")
PRODUCER = {"format": "pt", "producer": "specjax"}
"""Metadata in the header of every safetensors file that specjax writes."""

_AGAIN = "download it again"
_MAPPED_BYTES = 1 << 28
_BUFFERS = re.compile(r".*\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")
"""Matches the names of buffers that old checkpoints contain."""

Shards = Mapping[Path, list[str] | None]
"""Weight files, each with the tensors that the index says it has, or None without an index."""


class StoredTensor(NamedTuple):
    """A tensor in a file: the file, the tensor's name in it, its shape, and its type.

    If it has `parts`, these are in files, and it is computed from them (`mxfp4`). With `within`, an
    index on the first axis and a range of the second, it is that part of the tensor in the file.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...] = ()
    within: tuple[int, range] | None = None


def refuse_pickle(path: Path) -> InputError:
    """Return the InputError for weights in a pickle, which could run code."""
    return InputError(
        f"{path}: a pickle can run code and is not read; use safetensors files, or make them where "
        "torch is installed: save_pretrained in transformers, or save_file in safetensors.torch "
        "after torch.load(..., weights_only=True)"
    )


def find_shards(directory: Path, names: Collection[str] = (WEIGHTS,)) -> Shards:
    """Return the weight files of a directory: a file named in `names`, or the files of an index.

    Raises InputError if there are none.
    """
    for name in names:
        if (directory / name).exists():
            return {directory / name: None}
    index = directory / INDEX
    if not index.exists():
        for path in sorted(directory.iterdir()):
            if path.suffix in PICKLES:
                raise refuse_pickle(path)
        known = " or ".join((*names, f"{INDEX} with its shards"))
        raise InputError(f"{directory}: no weights; it needs {known}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map must name a file for each tensor; download it again")
    shards: dict[Path, list[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{index}: {shown(tensor)} is in {shown(name)}, which is not a plain file name"
            )
        listed = shards.setdefault(directory / name, [])
        assert listed is not None
        listed.append(tensor)
    missing = [path.name for path in shards if not path.exists()]
    if missing:
        raise InputError(
            f"{directory}: missing shard {', '.join(sorted(missing))}; download it again"
        )
    return shards


@contextmanager
def open_file(path: Path, remedy: str = _AGAIN) -> Iterator[Any]:
    """Open a safetensors file; raise InputError, ending with `remedy`, if it is not one."""
    with _opened(path, remedy) as file:
        yield file


def _opened(path: Path, remedy: str = _AGAIN) -> Any:
    try:
        return safe_open(regular_file(path, remedy), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a safetensors file ({one_line(error)}); {remedy}") from None


def tensor_reader() -> Callable[..., np.ndarray]:
    """Return a function `read(tensor, index)` for the values of tensors, for use by any thread.

    `index` is a tuple of numbers and slices, empty for a tensor without axes. Files stay open until
    the function is deleted, but are mapped anew after every `_MAPPED_BYTES`: the pages that were
    read of a mapped file count as memory of the process.
    """
    files: dict[Path, Any] = {}
    bytes_read, lock = 0, threading.Lock()

    def read(tensor: StoredTensor, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        nonlocal bytes_read
        if tensor.within is not None:
            first, rows = tensor.within
            some, *inputs = index or (slice(None),)
            assert isinstance(some, slice)
            some_rows = rows[some]
            index = (first, slice(some_rows.start, some_rows.stop), *inputs)
        with lock:
            if bytes_read > _MAPPED_BYTES:
                # A file that another thread is reading is closed after that.
                bytes_read = 0
                files.clear()
            if (file := files.get(tensor.path)) is None:
                file = files[tensor.path] = _opened(tensor.path)
        values = file.get_slice(tensor.name)[index] if index else file.get_tensor(tensor.name)
        with lock:
            bytes_read += values.nbytes
        return values

    return read


def read_headers(shards: Shards, dtypes: Collection[str]) -> list[StoredTensor]:
    """Return the tensors of files without their values, omitting obsolete buffers.

    Raises InputError for a tensor that is in the index but not in its file, and for types other
    than `dtypes`.
    """
    stored = []
    for path, listed in shards.items():
        with open_file(path) as file:
            present = set(file.keys())
            if lacking := sorted(set(listed or ()) - present):
                raise InputError(
                    f"{path}: lacks {lacking[0]}, which the index puts there "
                    f"({len(lacking)} tensors in all); download it again"
                )
            for name in present if listed is None else listed:
                if _BUFFERS.fullmatch(name):
                    continue
                entry = file.get_slice(name)
                if (dtype := entry.get_dtype()) not in dtypes:
                    raise InputError(
                        f"{path}: {name} has the type {dtype}, which is not supported; use a "
                        f"checkpoint in {', '.join(FLOATS)}"
                    )
                stored.append(StoredTensor(path, name, tuple(entry.get_shape()), dtype))
    return stored


def read_notes(path: Path) -> dict[str, str]:
    """Return the metadata in a file's header, by name."""
    with open_file(path) as file:
        return file.metadata() or {}


def is_ours(notes: Mapping[str, str]) -> bool:
    """Return whether the metadata of a header says that specjax wrote the file."""
    return notes.get("producer") == PRODUCER["producer"]


def write_tensors(tensors: Mapping[str, np.ndarray], path: Path, notes: Mapping[str, str]) -> None:
    """Write a safetensors file, with `notes` and the name of specjax in its header.

    Raises OSError if that fails.
    """
    try:
        # `ascontiguousarray` would give an axis to what has none.
        whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        save_file(whole, path, metadata={**notes, **PRODUCER})
        set_usual_mode(path)  # safetensors writes a file for its owner only
    except SafetensorError as error:
        raise OSError(one_line(error)) from None
