"""The description of a family of models: its config fields, and its tensor names by format."""

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
    Recurrence,
)
from specjax.models.mtp import Concat

_PARTS = {
    "norm": Norm,
    "attention": Attention,
    "mlp": Mlp,
    "embedding": Embedding,
    "experts": Experts,
    "recurrence": Recurrence,
}


@dataclass(frozen=True)
class MtpLayout:
    """The tensor names of a family's multi-token prediction modules.

    `prefix` begins the names of a module's tensors; it contains `{module}`, or `{layer}` if modules
    are numbered after the decoder's layers, or neither if there is at most one module. `names` maps
    names in the tree to names in files for the norms and the projection; the layer's tensors are
    named as in the decoder, after `layer`. `copies` are optional tensors that repeat tensors of the
    decoder. `concat` is the order of the projection's inputs, and `zero_first_embedding` says
    whether the embedding of the pair at position 0 is zero. Scales of the norms in `names` exceed
    the tree's by `norms_added`. With `unannounced`, a file may have a
    module that its config does not announce.
    """

    prefix: str
    names: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    concat: Concat = "embedding_first"
    layer: str = ""
    zero_first_embedding: bool = True
    norms_added: int = 0
    unannounced: bool = False


@dataclass(frozen=True)
class GgufLayout:
    """The architecture name and tensors of a family in GGUF files.

    `fixed` are metadata fields with a single valid value. If families share an architecture, those
    with `experts` or sliding `windows` read the files that have some. Without `mtp`, files have no
    multi-token prediction modules.
    """

    architecture: str
    tensors: tuple[TensorEntry, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    windows: bool = False
    mtp: MtpLayout | None = None


@dataclass(frozen=True)
class Family:
    """A family of models, identified by its `model_type` in config.json.

    `architecture` is the transformers class that runs it, and `parts` are the fields of its config,
    except vocabulary and family. Extra tensors whose names match the pattern `ignored` are
    accepted. A family without `gguf` cannot be read from GGUF files, and one without `mtp` has no
    multi-token prediction modules. With `mxfp4`, safetensors files may have kernels of experts in
    MXFP4.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...]
    ignored: str = ""
    gguf: GgufLayout | None = None
    mtp: MtpLayout | None = None
    mxfp4: bool = False

    def read(
        self, fields: Fields, vocab_size: int, unused_tokens: tuple[int, ...] = ()
    ) -> DecoderConfig:
        """Return the config that config.json describes or, given `GgufFields`, a GGUF's metadata.

        Raises InputError for features that the decoder lacks. The caller checks for unread fields.
        """
        known: dict[str, Any] = {}
        for part in self.parts:
            if isinstance(fields, GgufFields):
                known |= part.read_gguf(fields, known)
            else:
                known |= part.read(fields, known)
        values: dict[str, Any] = {"vocab_size": vocab_size, "unused_tokens": unused_tokens}
        inner: dict[str, dict[str, Any]] = {}
        has_recurrence = "recurrent" in known.get("mixers", ())
        for path, value in known.items():
            if path.startswith("recurrence.") and not has_recurrence:
                continue
            name, _, field_of_part = path.rpartition(".")
            (inner.setdefault(name, {}) if name else values)[field_of_part] = value
        values |= {name: _PARTS[name](**fields_of_part) for name, fields_of_part in inner.items()}
        return DecoderConfig(family=self.model_type, **values)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the fields of config.json that `read` would read as `config`."""
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields
