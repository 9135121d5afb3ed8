"""A conversation that a target wrote, and the names of a dataset's files.

A dataset's directory holds array_record files with one record per conversation, TFDS's own metadata
(any TFDS reader opens it: `tfds.builder_from_directory`), `specjax.json` with metadata that the
records lack, and `records.npy` with each record's id, length and number of labels. Text that was
tokenized for models that do not exist yet (`train.corpus`) has the same form: every token of it is
a label, and the directory `tokenizer` keeps its tokenizer, in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int32

from specjax.errors import InputError
from specjax.loading.heads.head import TargetMetadata
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer

NAME, SPLIT = "specjax_responses", "conversations"
"""The dataset and its only split, as TFDS calls them."""
METADATA, RECORDS, TOKENIZER = "specjax.json", "records.npy", "tokenizer"
FORMAT = 1
TARGET_FIELDS = tuple(one.name for one in fields(TargetMetadata))


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation of T tokens; `loss_mask` is true where the target itself wrote the token.

    `features` are target features of each token by name, each of the target's width D.
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
    """What a dataset keeps of the model that wrote it, JSON-ready."""
    return asdict(TargetMetadata.of(model))


def text_metadata(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a dataset of text keeps instead: any model with its tokenizer can be trained on it."""
    return {
        "name": name,
        "hidden_size": None,
        "vocab_size": tokenizer.vocab_size,
        "num_layers": None,
        "tokenizer": tokenizer.vocabulary_hash,
    }


def check_target(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise InputError where two targets' metadata differ in more than their names.

    What is None in one of them is unknown, and equals everything.
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
    """A feature's name as TFDS and its files allow it."""
    return name.replace(":", "_")


def import_tfds() -> Any:
    """TensorFlow Datasets, imported where it is used since that takes a second."""
    try:
        import tensorflow_datasets as tfds
        from array_record.python import array_record_module  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{error.name} is missing: pip install tensorflow-datasets array_record"
        ) from None
    return tfds
