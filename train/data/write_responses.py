"""A writer of datasets of conversations, in the format that `train.data.responses` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.files import folders
from specjax.files.path_checks import output_folder
from specjax.loading.texts.tfds_texts import import_tfds
from specjax.loading.tokenizers.huggingface_tokenizer import write_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.examples import (
    FORMAT,
    METADATA,
    NAME,
    RECORDS,
    SPLIT,
    TOKENIZER,
    Example,
    feature_key,
)
from train.data.tfds_files import disk, write_records


def write_responses(
    directory: str | Path,
    examples: Iterable[Example],
    metadata: Mapping[str, Any],
    feature_names: Sequence[str] = (),
    *,
    generation: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write conversations with the features `feature_names` as a dataset, atomically.

    `metadata` is the target's `target_metadata`. The dataset is written beside the directory, which
    appears, or with `overwrite` replaces an earlier dataset, once it is complete. `generation`
    (settings) and `tokenizer` (for a model that does not exist yet) are stored unchanged. Raises
    InputError, leaving the directory unchanged, for examples of another target, without any
    examples or labels, for a full disk, and as `folders.check_replaceable` does.
    """
    path = output_folder("output", directory)
    with folders.replacing(path, "dataset", overwrite=overwrite) as beside:
        counts = _write(path, beside, examples, metadata, tuple(feature_names))
        content = {
            "specjax_responses": FORMAT,
            "target": dict(metadata),
            "features": list(feature_names),
            "generation": dict(generation or {}),
            **counts,
        }
        with disk(path):
            (beside / METADATA).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            if tokenizer is not None:
                (beside / TOKENIZER).mkdir()
                write_tokenizer(tokenizer, beside / TOKENIZER)


def _write(
    path: Path,
    beside: Path,
    examples: Iterable[Example],
    metadata: Mapping[str, Any],
    names: tuple[str, ...],
) -> dict[str, int]:
    """Yield the records and TFDS's metadata; returns the counts for the metadata."""
    width, vocab_size = metadata["hidden_size"], metadata["vocab_size"]
    counted: list[tuple[int, int, int]] = []
    seen: set[int] = set()

    def records() -> Iterator[dict[str, Any]]:
        for example in examples:
            _check(example, vocab_size, width, names, seen)
            counted.append((example.id, len(example.tokens), int(example.loss_mask.sum())))
            yield _record(example, names)

    count = write_records(
        beside,
        NAME,
        SPLIT,
        _features(import_tfds(), width, names),
        records(),
        description="Conversations that a language model wrote, for training its drafters.",
        where=path,
        compress=not names,
    )
    if not count:
        raise InputError("responses: there is not a single conversation to write; generate some")
    table = np.array(counted, np.int64)
    if not table[:, 2].any():
        raise InputError("responses: no token of any conversation is the target's; check the masks")
    with disk(path):
        np.save(beside / RECORDS, table)
    return {
        "num_records": count,
        "num_tokens": int(table[:, 1].sum()),
        "num_labels": int(table[:, 2].sum()),
    }


def _features(tfds: Any, width: int | None, names: tuple[str, ...]) -> dict[str, Any]:
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
    return fields


def _record(example: Example, names: tuple[str, ...]) -> dict[str, Any]:
    record = {
        name: getattr(example, name)
        for name in ("id", "category", "source", "licence", "temperature", "tokens", "loss_mask")
    }
    if names:
        record["features"] = {feature_key(name): example.features[name] for name in names}
    return record


def _check(
    example: Example,
    vocab_size: int,
    width: int | None,
    names: tuple[str, ...],
    seen: set[int],
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
