"""A conversation written by a target, and the file names of a dataset.

A dataset's directory has array_record files with one record per conversation, TFDS's own metadata
(any TFDS reader can open it: `tfds.builder_from_directory`), `specjax.json` with metadata that the
records lack, and `records.npy` with each record's id, length and number of labels. Text that was
tokenized for models that do not exist yet (`train.corpus`) has the same format: every token is a
label, and the directory `tokenizer` has its tokenizer in Hugging Face's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int32

from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.heads.head import TargetMetadata

NAME, SPLIT = "specjax_responses", "conversations"
"""The dataset and its only split, as TFDS calls them."""
METADATA, RECORDS, TOKENIZER = "specjax.json", "records.npy", "tokenizer"
FORMAT = 1
TARGET_FIELDS = tuple(one.name for one in fields(TargetMetadata))


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation of T tokens; `loss_mask` is True for tokens that the target wrote.

    `features` are the target's features of each token, arrays [T, D] by name.
    """

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    features: Mapping[str, Float16[np.ndarray, "T D"]] = field(default_factory=dict)
    category: str = ""
    temperature: float = 0.0
    id: int = 0
    source: str = ""
    licence: str = ""


def target_metadata(model: Model) -> dict[str, Any]:
    """Return what a dataset records about the model that wrote it, JSON-ready."""
    return asdict(TargetMetadata.of(model))


def text_metadata(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what a dataset of text records in place of a target, JSON-ready.

    `name` is the tokenizer's. Any model with the same tokenizer can be trained on the dataset.
    """
    return {
        "name": name,
        "hidden_size": None,
        "vocab_size": tokenizer.vocab_size,
        "num_layers": None,
        "tokenizer": tokenizer.vocabulary_hash,
    }


def check_target(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise InputError unless the metadata of two targets, `ours` and `theirs`, are compatible.

    The targets' names may differ. A value of None is unknown, and equals every value. `where`
    begins the message.
    """
    known = {name: value for name, value in ours.items() if value is not None}
    mine, other = TargetMetadata(**{**theirs, **known}), TargetMetadata(**theirs)
    if (name := mine.difference(other)) is not None:
        raise InputError(
            f"{where}: written by another target, {mine.name!r:.60} with "
            f"{name}={ours[name]!r:.20} where {other.name!r:.60} has {theirs[name]!r:.20}; "
            "use the target's own responses"
        )


def feature_key(name: str) -> str:
    """Return a feature's name in a form that TFDS and file names allow."""
    return name.replace(":", "_")
