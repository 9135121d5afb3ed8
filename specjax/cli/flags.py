"""Command lines with flags but no config file; each flag has a kind, which checks it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from specjax.errors import InputError
from specjax.fields import Choice, Either, Flag, Kind, Number, Whole, check_values


@dataclass(frozen=True)
class Listed:
    """Comma-separated values of one kind; `empty` allows an empty list."""

    kind: Kind
    empty: bool = False

    def check(self, name: str, value: Any) -> tuple:
        """Return the values as a tuple."""
        parts = value.split(",") if isinstance(value, str) else value
        if self.empty and value == "":
            return ()
        return tuple(self.kind.check(name, _typed(self.kind, part)) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser of flags, each of a kind, without a config file; bad flags raise InputError.

    `documentation` is printed by --help before the flags.
    """

    def __init__(self, prog: str, documentation: str | None) -> None:
        super().__init__(prog, description=documentation, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.fields: dict[str, Kind] = {}
        self.needed: list[str] = []

    def add_field(self, name: str, kind: Kind, help: str, *, default: Any = ...) -> None:
        """Add --name=VALUE, required without a default, or --name and --noname for a `Flag`."""
        self.fields[name] = kind
        if isinstance(kind, Flag):
            # Help shows the one that changes something.
            yes, no = (
                (argparse.SUPPRESS, f"do not {help}") if default else (help, argparse.SUPPRESS)
            )
            self.add_argument(f"--{name}", action="store_true", default=default, help=yes)
            self.add_argument(f"--no{name}", action="store_false", dest=name, help=no)
            return
        if default is ...:
            self.needed.append(name)
        given = default is not ... and default is not None
        self.add_argument(
            f"--{name}",
            default=default if given else None,
            metavar="{" + ",".join(kind.names) + "}" if isinstance(kind, Choice) else "VALUE",
            help=f"{help} ({default})" if given else help,
        )

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the checked values of all flags and other arguments; raise InputError."""
        given = vars(self.parse_args(argv))
        if missing := [name for name in self.needed if given[name] is None]:
            listed = [f"{name} is missing: pass --{name}=VALUE" for name in missing]
            raise InputError(f"{'; '.join(listed)}; --help lists the flags")
        others = {name: value for name, value in given.items() if name not in self.fields}
        values = {name: _typed(kind, given[name]) for name, kind in self.fields.items()}
        return {**others, **check_values(self.fields, values)}

    def error(self, message: str) -> NoReturn:
        """Raise InputError; called by argparse."""
        raise InputError(f"{message}; --help lists the flags")


def _typed(kind: Kind, value: Any) -> Any:
    """Return a flag's text as a number if its kind takes numbers and it is one, else unchanged."""
    kind = kind.kinds[0] if isinstance(kind, Either) else kind
    if not isinstance(value, str) or not isinstance(kind, Whole | Number):
        return value
    try:
        return int(value) if isinstance(kind, Whole) else float(value)
    except ValueError:
        return value
