"""The `--help` of commands with a config: the value and meaning of each field.

The meaning is the docstring below the field in its dataclass; its kind describes valid values.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from specjax.cli.config_file import field_names, field_value
from specjax.fields import (
    Choice,
    Either,
    Flag,
    Number,
    OptionalSection,
    Whole,
    dataclass_in,
    fields_of,
    is_inline,
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
    meanings, kinds = dict(_meanings(source)), fields_of(source)
    lines = [documentation.strip(), "", "Options:"]
    lines += [f"  {name:<{width}}  {meaning}" for name, meaning in flags.items()]
    lines += ["", "Fields of the config, as --config.FIELD=VALUE:"]
    section = ""
    for name in _in_order(field_names(config), list(meanings)):
        before = name.rpartition(".")[0]
        if before != section:
            text = meanings.get(before)
            lines += ["", *(_wrapped(f"{before}: {text}", 2) if text else ())]
        section = before
        value, allowed = field_value(config, name), _allowed(_kind(kinds, name))
        line = f"  {name}" if value is None else f"  {name} = {value}"
        if meaning := meanings.get(name):
            lines += [line, *_wrapped(f"{meaning} {allowed}", 6)]
        else:
            lines.append(f"{line}  {allowed}".rstrip())
    return "\n".join(lines)


def _in_order(names: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return fields in the order in which they are declared, with those of sections last."""
    index = {name: number for number, name in enumerate(declared)}

    def key(name: str) -> tuple[bool, int, int]:
        section = name.rpartition(".")[0]
        return bool(section), index.get(section, -1), index.get(name, -1)

    return sorted(names, key=key)


def _meanings(source: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the meaning of each field and section of a dataclass."""
    texts = _field_documentation(source)
    hints = type_hints(source)
    for field in dataclasses.fields(source):
        name, hint = prefix + field.name, hints[field.name]
        section = dataclass_in(hint)
        if section is None or field.name in texts:
            yield name, texts.get(field.name, "")
        else:
            text = " ".join((inspect.getdoc(section) or "").split())
            yield name, text.partition(" Raises ")[0]
        if section is not None:
            yield from _meanings(section, prefix if is_inline(hint) else f"{name}.")


def _field_documentation(source: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its base classes, by field."""
    texts: dict[str, str] = {}
    for base in reversed(source.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[before.target.id] = inspect.cleandoc(after.value.value)
    return texts


def _kind(kinds: Any, name: str) -> Any:
    """Return the kind of the field with a dotted name, or None if it has none."""
    for part in name.split("."):
        kinds = kinds.fields if isinstance(kinds, OptionalSection) else kinds
        kinds = kinds.get(part) if isinstance(kinds, Mapping) else None
    return kinds


def _allowed(kind: Any) -> str:
    """Return the values that a kind allows, in brackets, or "" if that says nothing new."""
    if isinstance(kind, Either) and not kind.remedy:
        return _allowed(kind.kinds[0])
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
