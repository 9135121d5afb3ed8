"""The `--help` of commands with a config: the value and meaning of each field.

The meaning is the docstring below the field in its dataclass; its kind describes valid values.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from specjax.apps.command_line.config_file import field_names, field_value
from specjax.fields import (
    FIELDS,
    Choice,
    DependentFields,
    Either,
    Fields,
    Flag,
    Number,
    OptionalSection,
    Shared,
    Whole,
    dataclass_in,
    field_meanings,
    fields_of,
    inline_in,
    type_hints,
)

_WIDTH = 100


def config_help(
    documentation: str,
    config: ml_collections.ConfigDict,
    source: type,
    flags: Mapping[str, str],
) -> str:
    """Return a command's documentation, its flags, and the fields of its config.

    `config` has the values to show, and the dataclass `source` declares the fields. `flags` maps
    the names of flags without a value to their meanings.
    """
    flags = {
        "--config=FILE": "a config file, or the name of one that comes with specjax",
        **{f"--{name}": meaning for name, meaning in flags.items()},
        "--help": "print this",
    }
    width = max(map(len, flags))
    meanings, kinds = dict(_meanings(source)), _resolved(fields_of(source), config)
    declared = dict.fromkeys(meanings)
    for name, kind in kinds.items():
        if isinstance(kind, Mapping):
            declared |= dict.fromkeys(f"{name}.{inside}" for inside in kind)
    lines = [documentation.strip(), "", "Options:"]
    lines += [f"  {name:<{width}}  {meaning}" for name, meaning in flags.items()]
    lines += ["", "Fields of the config, as --config.FIELD=VALUE:"]
    section = ""
    for name in _in_order(field_names(config), list(declared)):
        before = name.rpartition(".")[0]
        if before != section:
            text = meanings.get(before)
            lines += ["", *(_wrapped(f"{before}: {text}", 2) if text else ())]
        section = before
        value, kind = field_value(config, name), _kind(kinds, name)
        lines.append(f"  {name}" if value is None else f"  {name} = {value}")
        if isinstance(kind, Shared):
            for text in _by_user(kind):
                lines += _wrapped(text, 6)
        else:
            lines += _wrapped(f"{meanings.get(name, '')} {_allowed(kind)}", 6)
    return "\n".join(lines)


def _resolved(kinds: Fields, config: ml_collections.ConfigDict) -> Fields:
    """Return the kinds of a config's fields, where these depend on values, for its values."""
    return {
        name: kind.of(field_value(config, f"{name}.{kind.on}"))
        if isinstance(kind, DependentFields)
        else kind
        for name, kind in kinds.items()
    }


def _by_user(field: Shared) -> Iterator[str]:
    """Yield the meanings of a shared field with the values that they allow, each with its users."""
    users: dict[str, list[str]] = {}
    for use in field.uses:
        unset = use.default in (None, (), inspect.Parameter.empty)
        default = "" if unset else f"By default {use.default}. "
        users.setdefault(f"{use.meaning} {default}{_allowed(use.kind)}", []).append(use.user)
    for text, names in users.items():
        yield f"{', '.join(names)}: {text}" if any(names) else text


def _in_order(names: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return fields in the order in which they are declared, with those of sections last."""
    index = {name: number for number, name in enumerate(declared)}

    def key(name: str) -> tuple[bool, int, int]:
        section = name.rpartition(".")[0]
        return bool(section), index.get(section, -1), index.get(name, -1)

    return sorted(names, key=key)


def _meanings(source: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the meaning of each field and section of a dataclass."""
    texts = field_meanings(source)
    hints = type_hints(source)
    for field in dataclasses.fields(source):
        name, hint = prefix + field.name, hints[field.name]
        section = dataclass_in(hint)
        if section is None or field.name in texts:
            yield name, texts.get(field.name, "")
        else:
            text = (inspect.getdoc(section) or "").partition(FIELDS)[0]
            yield name, " ".join(text.split()).partition(" Raises ")[0]
        inline = inline_in(hint)
        if inline is not None:
            inside = _meanings(section, prefix)
            yield from (each for each in inside if each[0] not in inline.without)
        elif section is not None:
            yield from _meanings(section, f"{name}.")


def _kind(kinds: Any, name: str) -> Any:
    """Return the kind of the field with a dotted name, or None if it has none."""
    for part in name.split("."):
        kinds = kinds.fields if isinstance(kinds, OptionalSection) else kinds
        kinds = kinds.get(part) if isinstance(kinds, Mapping) else None
    return kinds


def _allowed(kind: Any) -> str:
    """Return the values that a kind allows, in brackets, or "" if that says nothing new."""
    if isinstance(kind, Either) and not kind.remedy:
        return _allowed(kind.kinds[-1])  # whose error Either raises
    if isinstance(kind, Choice):
        return f"[{' | '.join(kind.names)}]"
    if isinstance(kind, Flag):
        return "[true | false]"
    if isinstance(kind, Whole | Number):
        return f"[{kind.says.removeprefix('use ')}]"
    remedy = getattr(kind, "remedy", "")
    return f"[{remedy.removeprefix('use ')}]" if remedy else ""


def _wrapped(text: str, indent: int) -> list[str]:
    """Return a text as lines of limited width, indented by `indent` spaces."""
    space = " " * indent
    text = " ".join(text.split()).replace("`", "")
    return textwrap.wrap(text, _WIDTH, initial_indent=space, subsequent_indent=space)
