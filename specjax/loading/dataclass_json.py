"""Reading of dataclasses from the JSON in checkpoints, with a check of every field."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from specjax.errors import InputError

T = TypeVar("T")
_LARGEST, _LARGEST_INT = 1e30, 2**31 - 1


def read_dataclass(where: str, kind: type[T], metadata: dict[str, Any]) -> T:
    """Return an instance of the dataclass `kind`, from the JSON form of `dataclasses.asdict`.

    Fields may be dataclasses and tuples; those with a default may be missing. `where` begins
    messages. Raises InputError for unknown, missing and invalid fields.
    """
    hints = get_type_hints(kind)
    optional = [
        field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    ]

    def value(name: str, raw: Any) -> Any:
        if isinstance(raw, list):
            return tuple(raw)
        inner = [
            hint for hint in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(hint)
        ]
        return read_dataclass(name, inner[0], raw) if inner and isinstance(raw, dict) else raw

    _check_fields(where, metadata, hints, optional)
    return kind(**{name: value(name, raw) for name, raw in metadata.items()})


def _check_fields(
    where: str, metadata: dict[str, Any], kinds: Mapping[str, Any], optional: Collection[str]
) -> None:
    """Raise InputError unless the names and types of `metadata` are those of `kinds`.

    Names in `optional` may be missing.
    """
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


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a JSON value has the type `kind`; implausibly large numbers have none."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in inside)
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
