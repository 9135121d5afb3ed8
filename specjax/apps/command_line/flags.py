"""Command lines with flags but no config file: the fields of a dataclass, as --name=VALUE."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from specjax.apps.command_line import command
from specjax.errors import InputError
from specjax.fields import (
    Choice,
    Either,
    Flag,
    Kind,
    Number,
    Whole,
    check_values,
    field_meanings,
    fields_of,
)

Flags = TypeVar("Flags")
"""The dataclass that declares a command's flags."""


@dataclass(frozen=True)
class Listed:
    """The field type of comma-separated values of one kind; `empty` allows an empty list."""

    kind: Kind
    empty: bool = False

    def check(self, name: str, value: Any) -> tuple:
        """Return a text of comma-separated values as a tuple of checked values.

        Raises InputError, which names the field `name`, for an invalid value.
        """
        parts = value.split(",") if isinstance(value, str) else value
        if self.empty and value == "":
            return ()
        return tuple(self.kind.check(name, _typed(self.kind, part)) for part in parts)


@dataclass(frozen=True)
class Positional:
    """The field type of arguments without a name, of which there may be any number.

    `shown` is what --help calls them.
    """

    shown: str

    def check(self, name: str, value: Any) -> tuple:
        """Return the arguments as a tuple."""
        del name
        return tuple(value)


def run_flags(
    main: Callable[[Flags], int | None],
    source: type[Flags],
    argv: Sequence[str] | None,
    *,
    program: str,
    documentation: str | None,
    interrupted: str = "interrupted",
) -> int:
    """Call `main` with an instance of the dataclass `source`; return the command's exit code.

    The instance has the checked values of the flags in `argv`, by default the process's arguments.
    A field without a default is a flag that must be given; a `Flag` is --name or --noname. `--help`
    prints how to call `program`, the documentation, and the flags with the meanings that `source`
    declares. `main` returns the exit code, or None for 0. Otherwise like `command.run`.
    """
    parser = _parser(source, program, documentation)

    def act(arguments: list[str]) -> int:
        return main(source(**_read(source, parser, arguments))) or 0

    return command.run(act, argv, parser.format_help(), interrupted=interrupted)


def _read(source: type, parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Return the checked values of all flags in `argv`, by name.

    Raises InputError for unknown, missing and invalid ones.
    """
    parsed, kinds = vars(parser.parse_args(argv)), fields_of(source)
    needed = [name for name, default in _defaults(source).items() if default is _NEEDED]
    if missing := [name for name in needed if parsed[name] is None]:
        listed = [f"{name} is missing: pass --{name}=VALUE" for name in missing]
        raise InputError(f"{'; '.join(listed)}; --help lists the flags")
    return check_values(kinds, {name: _typed(kind, parsed[name]) for name, kind in kinds.items()})


_NEEDED = dataclasses.MISSING


def _defaults(source: type) -> Mapping[str, Any]:
    """Return the default of each field by name; `_NEEDED` if it has none."""
    return {field.name: field.default for field in dataclasses.fields(source)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise InputError with `message`; argparse calls this for invalid command lines."""
        raise InputError(f"{message}; --help lists the flags")


def _parser(source: type, program: str, documentation: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command line whose flags are the fields of a dataclass."""
    parser = _Parser(program, description=documentation, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    meanings, defaults = field_meanings(source), _defaults(source)
    for name, kind in fields_of(source).items():
        default, meaning = defaults[name], " ".join(meanings.get(name, "").split())
        if isinstance(kind, Positional):
            parser.add_argument(name, nargs="*", metavar=kind.shown, help=meaning)
        elif isinstance(kind, Flag):
            # Help shows only the flag that changes the default.
            yes, no = meaning, argparse.SUPPRESS
            if default:
                yes, no = no, f"Do not {meaning[:1].lower()}{meaning[1:]}"
            parser.add_argument(f"--{name}", action="store_true", default=default, help=yes)
            parser.add_argument(f"--no{name}", action="store_false", dest=name, help=no)
        else:
            unset = default is _NEEDED or default is None
            parser.add_argument(
                f"--{name}",
                default=None if unset else default,
                metavar="{" + ",".join(kind.names) + "}" if isinstance(kind, Choice) else "VALUE",
                help=meaning if unset or default == "" else f"{meaning} By default {default}.",
            )
    return parser


def _typed(kind: Kind, value: Any) -> Any:
    """Return a flag's text as a number if its kind takes numbers and the text is a number.

    Any other value is returned unchanged.
    """
    kind = kind.kinds[0] if isinstance(kind, Either) else kind
    if not isinstance(value, str) or not isinstance(kind, Whole | Number):
        return value
    try:
        return int(value) if isinstance(kind, Whole) else float(value)
    except ValueError:
        return value
