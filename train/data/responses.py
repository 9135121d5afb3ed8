"""A reader of the datasets of conversations that a target wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64

from specjax.errors import InputError, one_line
from specjax.files import folder_checksums
from specjax.files.json_files import read_json_file
from specjax.files.open_files import regular_files
from specjax.files.path_checks import user_path
from specjax.loading.texts.tfds_texts import import_tfds
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.examples import (
    FORMAT,
    METADATA,
    RECORDS,
    SPLIT,
    TARGET_FIELDS,
    TOKENIZER,
    Example,
    check_target,
    feature_key,
)

VALIDATION_EVERY = 50
"""Conversations whose id is divisible by this number are held out from training."""


class Numbering:
    """A source of ids for conversations of a dataset, of which the caller says what is held out.

    For what must be held out together, or not at all, such as the pieces of a document.
    """

    def __init__(self) -> None:
        self._held_out = self._trained = 0

    def next(self, held_out: bool) -> int:
        """Return an unused id, one of a conversation that is held out if `held_out`."""
        if held_out:
            self._held_out += 1
            return VALIDATION_EVERY * (self._held_out - 1)
        self._trained += 1
        return self._trained + (self._trained - 1) // (VALIDATION_EVERY - 1)


def held_out_groups(groups: Iterable[str]) -> frozenset[str]:
    """Return the groups of conversations that are held out, one in `VALIDATION_EVERY` on average.

    They are chosen by their names alone, so that datasets agree. If there are several, at least one
    is held out; a single one is not.
    """
    numbers = {
        name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in groups
    }
    if len(numbers) < 2:
        return frozenset()
    chosen = [name for name, number in numbers.items() if number % VALIDATION_EVERY == 0]
    return frozenset(chosen or [min(numbers, key=numbers.__getitem__)])


@dataclass(frozen=True, eq=False)
class Responses:
    """A dataset of conversations on disk; `responses[i]` reads conversation i as an `Example`.

    `len(responses)` is their number, n. `lengths` [n] and `num_labels` [n] count each
    conversation's tokens and those that the target wrote; `validation` [n] is True for held-out
    conversations.
    """

    directory: Path
    metadata: Mapping[str, Any] = field(repr=False)
    _records: Int64[np.ndarray, "n 3"] = field(repr=False)

    @property
    def target(self) -> dict[str, Any]:
        """The metadata of the model that wrote the conversations."""
        return dict(self.metadata["target"])

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the target features in each record."""
        return tuple(self.metadata["features"])

    @property
    def generation(self) -> dict[str, Any]:
        """The settings with which the conversations were generated."""
        return dict(self.metadata["generation"])

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the tokens, or None if only the target has it.

        Raises InputError for a tokenizer that does not match the tokens.
        """
        if not (self.directory / TOKENIZER).is_dir():
            return None
        tokenizer = read_tokenizer(self.directory / TOKENIZER)
        if tokenizer is None or tokenizer.vocabulary_hash != self.target["tokenizer"]:
            raise _damaged(self.directory, f"{TOKENIZER} is missing, or another one")
        return tokenizer

    @property
    def ids(self) -> Int64[np.ndarray, "n"]:
        """The ids of the conversations."""
        return self._records[:, 0]

    @cached_property
    def lengths(self) -> Int32[np.ndarray, "n"]:
        """The number of tokens of each conversation, prompt included."""
        return self._records[:, 1].astype(np.int32)

    @cached_property
    def num_labels(self) -> Int32[np.ndarray, "n"]:
        """The number of tokens of each conversation that its loss mask selects."""
        return self._records[:, 2].astype(np.int32)

    @cached_property
    def validation(self) -> Bool[np.ndarray, "n"]:
        """A mask of the held-out conversations."""
        return self.ids % VALIDATION_EVERY == 0

    @cached_property
    def _source(self) -> Any:
        tfds = import_tfds()
        try:
            return tfds.builder_from_directory(self.directory).as_data_source(SPLIT)
        except Exception as error:  # whatever TFDS makes of files that are not as it wrote them
            raise _damaged(self.directory, one_line(error)[:120]) from None

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        try:
            row = self._source[int(index) % len(self)]
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(
                f"{self.directory}: conversation {index} cannot be read ({one_line(error)[:120]}); "
                "write the dataset again"
            ) from None
        stored = row.get("features", {})
        return Example(
            tokens=row["tokens"],
            loss_mask=row["loss_mask"],
            features={name: stored[feature_key(name)] for name in self.feature_names},
            category=row["category"].decode(),
            temperature=float(row["temperature"]),
            id=int(row["id"]),
            source=row["source"].decode(),
            licence=row["licence"].decode(),
        )


def open_responses(directory: str | Path, target: Mapping[str, Any] | None = None) -> Responses:
    """Open a dataset that `write_responses` wrote, without reading its records.

    Raises InputError for any other directory, a damaged dataset, one without conversations or
    labels, and one written by another target than `target` (a result of `target_metadata`)
    describes.
    """
    path = user_path("data", directory)
    metadata = _read_metadata(path)
    try:
        records = np.load(path / RECORDS, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, f"{RECORDS}: {one_line(error)[:80]}") from None
    if records.dtype != np.int64 or records.ndim != 2 or records.shape[1] != 3:
        raise _damaged(path, f"{RECORDS} has shape {records.shape} of {records.dtype}")
    if not len(records):
        raise InputError(f"{path}: an empty dataset, without a conversation; generate some")
    if not records[:, 2].any():
        raise InputError(
            f"{path}: a fully masked dataset, without a token that the target wrote; "
            "generate responses"
        )
    if len(records) != metadata["num_records"]:
        raise _damaged(
            path, f"{len(records)} records where {METADATA} says {metadata['num_records']}"
        )
    if target is not None:
        check_target(str(path), metadata["target"], target)
    return Responses(path, metadata, records)


def _read_metadata(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; give one that train.generate wrote")
    regular_files(path, "write the dataset again")
    if not (path / METADATA).is_file():
        raise InputError(
            f"{path}: not a dataset of responses ({METADATA} is missing); "
            "give a directory that train.generate wrote"
        )
    marker = folder_checksums.read_marker(path)
    needed = (METADATA, RECORDS)
    if marker is not None and (damage := folder_checksums.find_damage(path, marker, None, needed)):
        raise _damaged(path, damage)
    metadata = read_json_file(path / METADATA, "a damaged dataset: write it again")
    if not isinstance(metadata, dict) or metadata.get("specjax_responses") != FORMAT:
        raise InputError(f"{path}: not of a format that this version reads; write it again")
    kinds = {"target": dict, "features": list, "num_records": int, "generation": dict}
    for name, kind in kinds.items():
        if not isinstance(metadata.get(name), kind):
            raise _damaged(path, f"{METADATA} has no {name!r} of use")
    if odd := sorted(set(TARGET_FIELDS) ^ set(metadata["target"])):
        raise _damaged(path, f"{METADATA}: the target's {odd[0]!r} is missing or unknown")
    return metadata


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path}: a damaged dataset ({what}); write it again")
