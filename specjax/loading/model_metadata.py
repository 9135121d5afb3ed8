"""A model's config and tokenizer as JSON in checkpoints; every field is checked when read."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tokenizers

from specjax.errors import InputError
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.tokenizer import Tokenizer, refused
from specjax.models.config import DecoderConfig

T = TypeVar("T")
_LARGEST, _LARGEST_INT = 1e30, 2**31 - 1
_TOKENIZER = {
    "backend": str,
    "bos_id": int | None,
    "eos_ids": list[int],
    "chat_template": str | None,
    "special_tokens": dict[str, str],
    "rows": int | None,
    "add_bos": bool,
}
_NOT_ALWAYS = ("rows", "add_bos")
"""Fields of the tokenizer that came later, and one that is no more: its backend says it."""


def config_metadata(config: DecoderConfig) -> dict[str, Any]:
    """What `read_config` reads."""
    return dataclasses.asdict(config)


def read_config(metadata: dict[str, Any]) -> DecoderConfig:
    """The config; raises InputError for unknown, missing and invalid fields."""
    return _read_dataclass("config", DecoderConfig, metadata)


def _read_dataclass(where: str, kind: type[T], metadata: dict[str, Any]) -> T:
    """A dataclass from JSON; what it holds may be dataclasses and tuples."""
    fields, hints = dataclass_fields(where, metadata, kind), get_type_hints(kind)

    def value(name: str, raw: Any) -> Any:
        if isinstance(raw, list):
            return tuple(raw)
        inner = [
            one for one in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(one)
        ]
        return _read_dataclass(name, inner[0], raw) if inner and isinstance(raw, dict) else raw

    return kind(**{name: value(name, raw) for name, raw in fields.items()})


def head_metadata(config: Any) -> dict[str, Any]:
    """What `read_head_config` reads, of the config of a trained head."""
    metadata = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    return {
        name: config_metadata(value) if isinstance(value, DecoderConfig) else value
        for name, value in metadata.items()
    }


def read_head_config(where: str, kind: type[T], metadata: dict[str, Any]) -> T:
    """The config of a trained head; raises InputError as `read_config` does."""
    fields = dict(dataclass_fields(where, metadata, kind))
    if "decoder" in get_type_hints(kind):
        fields["decoder"] = read_config(fields["decoder"])
    if "taps" in fields:
        fields["taps"] = tuple(fields["taps"])
    return kind(**fields)


def tokenizer_metadata(tokenizer: Tokenizer) -> dict[str, Any]:
    """What `read_tokenizer` reads."""
    return {
        "backend": tokenizer.backend.to_str(),
        "bos_id": tokenizer.bos_id,
        "eos_ids": list(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template,
        "special_tokens": dict(tokenizer.special_tokens),
        "rows": tokenizer.rows,
    }


def read_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer; raises InputError for invalid fields or an unreadable backend."""
    fields = check_fields("tokenizer", metadata, _TOKENIZER, _NOT_ALWAYS)
    with refused("tokenizer: not one that can be read", "save the model again"):
        backend = tokenizers.Tokenizer.from_str(fields["backend"])
    template = fields["chat_template"]
    return Tokenizer(
        backend,
        fields["bos_id"],
        tuple(fields["eos_ids"]),
        None
        if template is None
        else chat_templates.check_template("tokenizer: chat_template", template),
        tuple(fields["special_tokens"].items()),
        fields.get("rows"),
    )


def check_fields(
    where: str, metadata: dict[str, Any], kinds: Mapping[str, Any], optional: Collection[str] = ()
) -> dict[str, Any]:
    """The metadata; raises InputError unless their names and types are the given ones."""
    unknown = sorted(metadata.keys() - kinds.keys())
    missing = sorted(kinds.keys() - metadata.keys() - set(optional))
    for label, names in (("unknown", unknown), ("missing", missing)):
        if names:
            raise InputError(
                f"{where}: {names[0]!r:.40} is {label} ({len(names)} in all); "
                "use the version of specjax that saved it"
            )
    for name, value in metadata.items():
        if not _fits(value, kinds[name]):
            raise InputError(
                f"{where}: {name}={value!r:.40} is of no use; use a checkpoint as it was saved"
            )
    return metadata


def dataclass_fields(where: str, metadata: dict[str, Any], kind: type) -> dict[str, Any]:
    """The fields of a dataclass; those with a default may be missing."""
    optional = [
        field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    ]
    return check_fields(where, metadata, get_type_hints(kind), optional)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a type; numbers of an absurd size are not."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is Literal:
        return value in inside
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, inside[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inside[1]) for item in value.values())
    if kind is float:
        return type(value) in (int, float) and abs(value) <= _LARGEST
    if kind is int:
        return type(value) is int and abs(value) <= _LARGEST_INT
    if dataclasses.is_dataclass(kind):
        return isinstance(value, dict)
    return type(value) is (types.NoneType if kind is None else kind)
