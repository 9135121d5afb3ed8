"""A conversation that a target wrote, and what its files are called.

A dataset's directory holds array_record files with one record a conversation, TFDS's own metadata
(any TFDS reader opens it: `tfds.builder_from_directory`), `specjax.json` with what the records do
not say, and `records.npy` with each record's id, length and number of labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float16, Int32

from specjax.errors import InputError
from specjax.models.model import Model

NAME, SPLIT = "specjax_responses", "conversations"
"""The dataset and its only split, as TFDS calls them."""
FACTS, RECORDS = "specjax.json", "records.npy"
FORMAT = 1
TARGET_FIELDS = ("name", "hidden_size", "vocab_size", "num_layers", "tokenizer")


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


def target_facts(model: Model) -> dict[str, Any]:
    """What a dataset keeps of the model that wrote it; `tokenizer` is a hash of its vocabulary."""
    tokenizer = model.tokenizer
    vocabulary = None
    if tokenizer is not None:
        strings = [tokenizer.token(index) for index in range(tokenizer.vocab_size)]
        vocabulary = hashlib.sha256(json.dumps(strings).encode()).hexdigest()
    return {
        "name": model.name,
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "num_layers": model.config.num_layers,
        "tokenizer": vocabulary,
    }


def check_target(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise InputError where two targets' facts differ in more than their names."""
    for name in TARGET_FIELDS[1:]:
        mine, other = ours[name], theirs[name]
        if mine != other and not (name == "tokenizer" and None in (mine, other)):
            raise InputError(
                f"{where}: written by another target, {ours['name']!r:.60} with "
                f"{name}={mine!r:.20} where {theirs['name']!r:.60} has {other!r:.20}; "
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
