"""What a family is: the fields of its config, and its tensors' names in each format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specjax.loading.formats.families.schema import Part
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.typed_fields import Fields
from specjax.models.config import (
    Attention,
    DecoderConfig,
    Embedding,
    Experts,
    Mlp,
    Norm,
)
from specjax.models.heads.mtp import Concat

_PARTS = {
    "norm": Norm,
    "attention": Attention,
    "mlp": Mlp,
    "embedding": Embedding,
    "experts": Experts,
}


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
    """A family in GGUF files: its architecture there, and its tensors.

    `fixed` are fields of the metadata that have one value. Of families with one architecture those
    with `experts` read the files that have some. Without `mtp` a file has no modules for
    multi-token prediction.
    """

    architecture: str
    tensors: tuple[TensorEntry, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    mtp: MtpLayout | None = None


@dataclass(frozen=True)
class Family:
    """A family by its `model_type` in config.json, with the class of transformers that runs it.

    `parts` are the fields of its config, all but the vocabulary and the family. Names that match
    the pattern `ignored` may be there beside those of `tensors`. A family without `gguf` is not
    read from such files, and none without `mtp` has modules for multi-token prediction.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...]
    ignored: str = ""
    gguf: GgufLayout | None = None
    mtp: MtpLayout | None = None

    def read(
        self, fields: Fields, vocab_size: int, unused_tokens: tuple[int, ...] = ()
    ) -> DecoderConfig:
        """The config that a config.json or, as `GgufFields`, a GGUF's metadata describes.

        Raises InputError for what the decoder does not have; fields that are not asked for are the
        caller's to check.
        """
        known: dict[str, Any] = {}
        for part in self.parts:
            if isinstance(fields, GgufFields):
                known |= part.read_gguf(fields, known)
            else:
                known |= part.read(fields, known)
        values: dict[str, Any] = {"vocab_size": vocab_size, "unused_tokens": unused_tokens}
        inner: dict[str, dict[str, Any]] = {}
        for path, value in known.items():
            name, _, field_of_part = path.rpartition(".")
            (inner.setdefault(name, {}) if name else values)[field_of_part] = value
        values |= {name: _PARTS[name](**fields_of_part) for name, fields_of_part in inner.items()}
        return DecoderConfig(family=self.model_type, **values)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """The fields of config.json that `read` reads."""
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields
