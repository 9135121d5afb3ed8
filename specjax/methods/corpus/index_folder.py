"""The folder of a corpus index: tokens and their sorted positions, for memory mapping.

`tokens.npy` and `order.npy` are the arrays of a `SortedText`, `index.json` identifies the
tokenizer, and the folder's marker has the checksum of each file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from specjax.distributed import device_memory
from specjax.errors import InputError, one_line, shown
from specjax.files import atomic_writes, folders
from specjax.files.folder_checksums import find_damage, read_marker
from specjax.files.json_files import read_json_file
from specjax.files.open_files import regular_file
from specjax.files.path_checks import input_folder
from specjax.loading.dataclass_json import read_dataclass
from specjax.loading.model import Model
from specjax.methods.corpus.sorted_text import (
    SortedText,
    have_successor,
    sort_positions,
)
from specjax.sampling import text_digest

KIND = "corpus index"
TOKENS, ORDER, METADATA = "tokens.npy", "order.npy", "index.json"
_MAKE = "make one by python -m specjax.corpus_index"
_GIB = 1 << 30


@dataclass(frozen=True)
class IndexFolder:
    """The field type of the path of a folder with a corpus index."""

    def check(self, name: str, value: Any) -> str:
        """Return the absolute path `value`.

        Raises InputError, which names the field `name`, if the folder has no index.
        """
        folder = input_folder(name, value)
        marker = read_marker(folder)
        if marker is None or marker.kind != KIND:
            raise InputError(
                f"{name}={shown(str(value), 200)}: holds no index of a corpus; {_MAKE}"
            )
        return str(folder)


@dataclass(frozen=True)
class IndexMetadata:
    """The source and size of an index; `tokenizer` is a hash of the tokenizer's token strings."""

    source: str
    documents: int
    tokens: int
    positions: int
    vocab_size: int
    tokenizer: str


def write_index(
    folder: Path,
    tokens: Integer[np.ndarray, "T"],
    metadata: Callable[[int], IndexMetadata],
    tell: Callable[[int, int], object] = lambda done, total: None,
) -> IndexMetadata:
    """Sort the positions of documents' tokens and write the index; return its metadata.

    `metadata` is called with the number of positions and returns the metadata; `tell` is called
    with the number of positions sorted so far and their total number. The folder is written
    atomically, and positions are sorted in the mapped file. Raises InputError as
    `folders.replacing` does, and if no token has a successor.
    """
    chosen = have_successor(tokens)
    count = int(np.count_nonzero(chosen))
    written = metadata(count)
    if not count:
        raise InputError(
            f"input={written.source!r}: no document of two tokens or more; give more text"
        )
    with folders.replacing(folder, KIND, overwrite=False) as new:
        np.save(new / TOKENS, tokens)
        order = np.lib.format.open_memmap(new / ORDER, "w+", np.int32, (count,))
        sort_positions(tokens, chosen, order, lambda done: tell(done, count))
        order.flush()
        atomic_writes.write_text(new / METADATA, json.dumps(asdict(written), indent=1) + "\n")
    return written


def open_index(field: str, path: str, target: Model) -> SortedText:
    """Return the index in the folder `path`, memory-mapped, after comparing all checksums.

    Raises InputError, naming `field`, for a folder without an index and for an index that is
    damaged, made by another tokenizer than the target's, or larger than the free memory.
    """
    folder, where = Path(IndexFolder().check(field, path)), f"{field}={path!r}"
    marker = read_marker(folder)
    assert marker is not None, "checked"
    if damage := find_damage(folder, marker, needed=(TOKENS, ORDER, METADATA)):
        raise InputError(f"{where}: {damage}; copy it again, whole, or {_MAKE}")
    content = read_json_file(folder / METADATA, _MAKE)
    metadata = read_dataclass(where, IndexMetadata, content if isinstance(content, dict) else {})
    _check_tokenizer(where, metadata, target)
    text = _mapped(where, folder)
    needed, free = text.tokens.nbytes + text.order.nbytes, device_memory.free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{where}: {needed / _GIB:.1f} GiB are needed on the device, and {free / _GIB:.1f} GiB "
            "are free; make a smaller index (--max_tokens)"
        )
    return text


def _check_tokenizer(where: str, metadata: IndexMetadata, target: Model) -> None:
    tokenizer = target.tokenizer
    known = target.config if tokenizer is None else tokenizer
    if metadata.vocab_size != known.vocab_size:
        raise InputError(
            f"{where}: made with a tokenizer of {metadata.vocab_size} tokens, and {target.name} "
            f"has {known.vocab_size}; make one with its tokenizer"
        )
    if tokenizer is not None and metadata.tokenizer != tokenizer.vocabulary_hash:
        raise InputError(
            f"{where}: made with another tokenizer than that of {target.name}; make one with its "
            "tokenizer"
        )


def _mapped(where: str, folder: Path) -> SortedText:
    try:
        tokens, order = (
            np.load(regular_file(folder / name), mmap_mode="r", allow_pickle=False)
            for name in (TOKENS, ORDER)
        )
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{where}: cannot be read ({one_line(error):.120}); {_MAKE}") from None
    is_index = tokens.dtype in (np.uint16, np.int32) and order.dtype == np.int32
    if not is_index or tokens.ndim != 1 or order.ndim != 1 or not 0 < len(order) <= len(tokens):
        raise InputError(f"{where}: {TOKENS} and {ORDER} are those of no index; {_MAKE}")
    return SortedText(tokens, order, np.int32(len(order)), text_digest(tokens))
