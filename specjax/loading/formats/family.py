"""A family as rows: what fields of its config, and its tensors, are called in files.

One row serves both formats and both directions: it is read from config.json and from a GGUF's
metadata, and written to config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

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

Values = Mapping[str, Any]
"""Values of fields of a `DecoderConfig` by name; those of its parts are "attention.softcap"."""

_PARTS = {
    "norm": Norm,
    "attention": Attention,
    "mlp": Mlp,
    "embedding": Embedding,
    "experts": Experts,
}


class Stated(NamedTuple):
    """A field of a file: its name, its type, and what it is where the file does not state it.

    Of several names the first that is stated counts, or else the last. A `default` that is a
    function gets the values read so far; without a default the field must be there.
    """

    kind: Callable[[Fields, str, Any], Any]
    name: str | tuple[str, ...]
    default: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of its names."""
        return (self.name,) if isinstance(self.name, str) else self.name

    def read(self, fields: Fields, known: Values) -> Any:
        """Its value. Raises InputError for another type, and where it is missing."""
        stated = [name for name in self.names if fields.values.get(name) is not None]
        default = self.default(known) if callable(self.default) else self.default
        return self.kind(fields, (stated or self.names[-1:])[0], default)


def integer(name: str | tuple[str, ...], default: Any = None) -> Stated:
    """A whole number."""
    return Stated(Fields.integer, name, default)


def number(name: str, default: Any = None) -> Stated:
    """A number."""
    return Stated(Fields.number, name, default)


def optional_number(name: str, default: Any = None) -> Stated:
    """A number; null is None."""
    return Stated(Fields.optional_number, name, default)


def flag(name: str, default: bool = False) -> Stated:
    """True or false."""
    return Stated(Fields.flag, name, default)


class HasTensor(NamedTuple):
    """A flag that a GGUF states by having a tensor, or, with `absent`, by not having it."""

    name: str
    absent: bool = False

    def read(self, fields: GgufFields, known: Values) -> bool:
        """Whether the file says so."""
        return (self.name in fields.file.tensors) != self.absent


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Part:
    """Some fields of a config, read and written together.

    `read` and `read_gguf` return their values, given the fields of the file and the values of the
    parts before; `write` returns the fields of config.json.
    """

    read: Callable[[Fields, Values], Values] = _nothing
    write: Callable[[DecoderConfig], Mapping[str, Any]] = _nothing
    read_gguf: Callable[[GgufFields, Values], Values] = _nothing


def row(path: str, json: Stated | None, gguf: Stated | HasTensor | None = None) -> Part:
    """A field of a config as config.json and GGUF files state it; None: they do not."""

    def reader(stated: Any) -> Callable[[Any, Values], Values]:
        return lambda fields, known: {path: stated.read(fields, known)} if stated else {}

    def write(config: DecoderConfig) -> dict[str, Any]:
        if json is None or (path.startswith("experts.") and config.experts is None):
            return {}
        return {json.names[0]: attrgetter(path)(config)}

    return Part(reader(json), write, reader(gguf))


def computed(path: str, function: Callable[[Values], Any]) -> Part:
    """A field that follows from those before, in every file."""

    def read(_: Fields, known: Values) -> Values:
        return {path: function(known)}

    return Part(read, _nothing, read)


def fixed(values: Values) -> Part:
    """Values that every model of a family has."""
    return Part(lambda *_: values, _nothing, lambda *_: values)


def written(fields: Mapping[str, Any]) -> Part:
    """Fields of config.json that are written as they are, and say nothing when they are read."""
    return Part(write=lambda _: fields)


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

    def read(self, fields: Fields, vocab_size: int, unused_tokens: tuple[int, ...] = ()) -> Any:
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
        values: dict[str, Any] = {name: value for name, value in known.items() if "." not in name}
        for part_name, kind in _PARTS.items():
            prefix = f"{part_name}."
            inner = {
                name.removeprefix(prefix): value
                for name, value in known.items()
                if name.startswith(prefix)
            }
            if inner:
                values[part_name] = kind(**inner)
        return DecoderConfig(
            vocab_size=vocab_size,
            family=self.model_type,
            unused_tokens=unused_tokens,
            **values,
        )

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """The fields of config.json that `read` reads."""
        fields: dict[str, Any] = {}
        for part in self.parts:
            fields |= part.write(config)
        return fields
