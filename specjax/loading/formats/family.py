"""What a family's file says: its config's fields, and its tensors' names in each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import Concat


@dataclass(frozen=True)
class MtpLayout:
    """Where a family's modules for multi-token prediction are among its tensors.

    `prefix` begins the names of a module's tensors; it holds `{module}`, or `{layer}`, where
    modules are numbered on after the decoder's layers. `names` are those of its norms and its
    projection by their names in the tree; its layer's are the family's. `copies` may be there, the
    decoder's own tensors once more. `concat` is the order of the projection's inputs.
    """

    prefix: str
    names: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    concat: Concat = "embedding_first"


@dataclass(frozen=True)
class GgufLayout:
    """A family in GGUF files: its architecture there, its keys, its tensors.

    `read` returns fields of `DecoderConfig`, all but the vocabulary and the family. Of families
    with one architecture those with `experts` read the files that have some. Without `mtp` a file
    has no modules for multi-token prediction.
    """

    architecture: str
    read: Callable[[GgufKeys], dict[str, Any]]
    tensors: tuple[TensorEntry, ...]
    experts: bool = False
    mtp: MtpLayout | None = None


@dataclass(frozen=True)
class Family:
    """A family by its `model_type` in config.json, with the class of transformers that runs it.

    `read` returns fields of `DecoderConfig`, all but the vocabulary and the family, and raises
    InputError for what the decoder does not have; `unread_fields` judges what it does not ask for.
    `write` returns the fields of config.json that `read` reads. Names that match the pattern
    `ignored` may be there beside those of `tensors`. A family without `gguf` is not read from such
    files, and none without `mtp` has modules for multi-token prediction.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[DecoderConfig], Mapping[str, Any]]
    tensors: tuple[TensorEntry, ...]
    ignored: str = ""
    gguf: GgufLayout | None = None
    mtp: MtpLayout | None = None
