"""Writes conversations as `train.data.responses` reads them: whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, one_line
from specjax.files import folders
from specjax.files.paths import output_folder
from train.data.examples import (
    FORMAT,
    METADATA,
    NAME,
    RECORDS,
    SPLIT,
    Example,
    feature_key,
    import_tfds,
)

SHARD_BYTES = 128 << 20
"""A file is closed, and the next one begun, when it has grown to this size."""


def write_responses(
    directory: str | Path,
    examples: Iterable[Example],
    metadata: Mapping[str, Any],
    feature_names: Sequence[str] = (),
    *,
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write conversations with their `feature_names`; `metadata` is the writer's `target_metadata`.

    They are written beside the directory, which appears, or replaces an earlier dataset where
    `overwrite` is set, when all are there. `generation` is kept as it is. Raises InputError for
    examples that are not of this target, no examples or labels at all, as `check_free` does, and
    for a disk that is full; what the directory held is then still there.
    """
    path = output_folder("output", directory)
    check_free(path, overwrite)

    def write(beside: Path) -> None:
        counts = _write(path, beside, examples, metadata, tuple(feature_names), shard_bytes)
        content = {
            "specjax_responses": FORMAT,
            "target": dict(metadata),
            "features": list(feature_names),
            "generation": dict(generation or {}),
            **counts,
        }
        with _disk(path):
            (beside / METADATA).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    folders.write_folder(path, "dataset", write)


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """What a disk says, as an InputError; array_record says it with a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{path}: the dataset cannot be written ({one_line(error)[:120]}); "
            "free space or write elsewhere"
        ) from None


def check_free(directory: str | Path, overwrite: bool = False) -> None:
    """Raise InputError unless a directory is new, empty, or a dataset that may be replaced.

    One that holds a file that `write_responses` did not write may not.
    """
    path = output_folder("output", directory)
    if not overwrite and (path / METADATA).is_file():
        raise InputError(f"{path}: holds a dataset already; delete it, or write elsewhere")
    folders.check_replaceable(path, "dataset", str(path))


def _write(
    path: Path,
    beside: Path,
    examples: Iterable[Example],
    metadata: Mapping[str, Any],
    names: tuple[str, ...],
    shard_bytes: int,
) -> dict[str, int]:
    """The records and TFDS's metadata; returns the counts for the metadata."""
    tfds = import_tfds()

    width, vocab_size = metadata["hidden_size"], metadata["vocab_size"]
    features = _features(tfds, width, names)
    shards = _Shards(beside, compress=not names, shard_bytes=shard_bytes)
    records: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    try:
        for example in examples:
            _check(example, vocab_size, width, names, seen)
            record = features.serialize_example(_row(example, names))
            with _disk(path):
                shards.add(record)
            records.append((example.id, len(example.tokens), int(example.loss_mask.sum())))
    finally:
        with _disk(path):
            shards.close()
    table = np.array(records, np.int64).reshape(-1, 3)
    if not records:
        raise InputError("responses: there is not a single conversation to write; generate some")
    if not table[:, 2].any():
        raise InputError("responses: no token of any conversation is the target's; check the masks")
    with _disk(path):
        np.save(beside / RECORDS, table)
        template = shards.finish(tfds)
        split = tfds.core.SplitInfo(
            name=SPLIT,
            shard_lengths=shards.lengths,
            num_bytes=shards.num_bytes,
            filename_template=template,
        )
        tfds.folder_dataset.write_metadata(
            data_dir=beside,
            features=features,
            split_infos=[split],
            filename_template=template,
            check_data=False,
            disable_shuffling=True,
            description="Conversations that a language model wrote, for training its drafters.",
        )
    return {
        "num_records": len(records),
        "num_tokens": int(table[:, 1].sum()),
        "num_labels": int(table[:, 2].sum()),
    }


class _Shards:
    """array_record files that are numbered when their count is known."""

    def __init__(self, path: Path, compress: bool, shard_bytes: int) -> None:
        self._path, self._shard_bytes = path, shard_bytes
        # Groups of one record are what random access wants. Float16 features hardly shrink, and
        # unpacking them would take three times as long as reading them.
        self._options = "group_size:1" if compress else "group_size:1,uncompressed"
        self._writer: Any = None
        self._open_bytes = 0
        self.lengths: list[int] = []
        self.num_bytes = 0

    def add(self, record: bytes) -> None:
        from array_record.python import array_record_module

        if self._writer is None:
            file = self._path / f"{len(self.lengths)}.part"
            self._writer = array_record_module.ArrayRecordWriter(str(file), self._options)
            self.lengths.append(0)
        self._writer.write(record)
        self.lengths[-1] += 1
        self.num_bytes += len(record)
        self._open_bytes += len(record)
        if self._open_bytes >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._open_bytes = None, 0

    def finish(self, tfds: Any) -> Any:
        """Give the files the names that TFDS expects; returns its template of them."""
        template = tfds.core.ShardedFileTemplate(
            data_dir=self._path, dataset_name=NAME, split=SPLIT, filetype_suffix="array_record"
        )
        for index in range(len(self.lengths)):
            name = template.sharded_filepath(shard_index=index, num_shards=len(self.lengths))
            (self._path / f"{index}.part").rename(os.fspath(name))
        return template


def _features(tfds: Any, width: int, names: tuple[str, ...]) -> Any:
    def tensor(dtype: type, *shape: int | None) -> Any:
        # As bytes: as lists of numbers, decoding would take a hundred times as long.
        return tfds.features.Tensor(shape=shape, dtype=dtype, encoding=tfds.features.Encoding.BYTES)

    fields = {
        "id": np.int64,
        "category": tfds.features.Text(),
        "source": tfds.features.Text(),
        "licence": tfds.features.Text(),
        "temperature": np.float32,
        "tokens": tensor(np.int32, None),
        "loss_mask": tensor(np.bool_, None),
    }
    if names:
        fields["features"] = {feature_key(name): tensor(np.float16, None, width) for name in names}
    return tfds.features.FeaturesDict(fields)


def _row(example: Example, names: tuple[str, ...]) -> dict[str, Any]:
    row = {
        name: getattr(example, name)
        for name in ("id", "category", "source", "licence", "temperature", "tokens", "loss_mask")
    }
    if names:
        row["features"] = {feature_key(name): example.features[name] for name in names}
    return row


def _check(
    example: Example, vocab_size: int, width: int, names: tuple[str, ...], seen: set[int]
) -> None:
    where, tokens = f"conversation {example.id}", example.tokens
    if example.id < 0 or example.id in seen:
        raise InputError(f"{where}: ids must differ and be at least 0; number them anew")
    seen.add(example.id)
    if not len(tokens):
        raise InputError(f"{where}: has no tokens; leave it out")
    if example.loss_mask.shape != tokens.shape:
        raise InputError(
            f"{where}: {len(tokens)} tokens and a loss mask of {example.loss_mask.shape}; "
            "give one entry a token"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise InputError(
            f"{where}: token id {wrong} is outside the vocabulary of {vocab_size} tokens; "
            "use responses of this target"
        )
    if set(example.features) != set(names):
        raise InputError(
            f"{where}: brings the features {sorted(example.features)} where {sorted(names)} "
            "are to be written; give exactly these"
        )
    for name, values in example.features.items():
        if values.shape != (len(tokens), width) or values.dtype != np.float16:
            raise InputError(
                f"{where}: {name} is {values.dtype} {values.shape} where float16 "
                f"({len(tokens)}, {width}) is stored; give the target's own features"
            )
        if not np.isfinite(values).all():
            raise InputError(
                f"{where}: {name} holds values that are not finite in float16; "
                "do not store this feature"
            )
