"""Command lines with flags but no config file; each flag has a kind, which checks its value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from specjax.errors import InputError
from specjax.fields import Choice, Either, Flag, Kind, Number, Whole, check_values


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


class Parser(argparse.ArgumentParser):
    """A command-line parser without a config file, whose flags have kinds that check them.

    Bad flags raise InputError. `documentation` is printed by --help before the flags.
    """

    def __init__(self, prog: str, documentation: str | None) -> None:
        super().__init__(prog, description=documentation, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.fields: dict[str, Kind] = {}
        self.needed: list[str] = []

    def add_field(self, name: str, kind: Kind, help: str, *, default: Any = ...) -> None:
        """Add --name=VALUE, required without a default, or --name and --noname for a `Flag`.

        `help` is the text that --help shows.
        """
        self.fields[name] = kind
        if isinstance(kind, Flag):
            # Help shows only the flag that changes the default.
            yes, no = (
                (argparse.SUPPRESS, f"do not {help}") if default else (help, argparse.SUPPRESS)
            )
            self.add_argument(f"--{name}", action="store_true", default=default, help=yes)
            self.add_argument(f"--no{name}", action="store_false", dest=name, help=no)
            return
        if default is ...:
            self.needed.append(name)
        has_default = default is not ... and default is not None
        self.add_argument(
            f"--{name}",
            default=default if has_default else None,
            metavar="{" + ",".join(kind.names) + "}" if isinstance(kind, Choice) else "VALUE",
            help=f"{help} ({default})" if has_default else help,
        )

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the checked values of all flags and arguments in `argv`, by name.

        Raises InputError for unknown, missing and invalid ones.
        """
        parsed = vars(self.parse_args(argv))
        if missing := [name for name in self.needed if parsed[name] is None]:
            listed = [f"{name} is missing: pass --{name}=VALUE" for name in missing]
            raise InputError(f"{'; '.join(listed)}; --help lists the flags")
        others = {name: value for name, value in parsed.items() if name not in self.fields}
        values = {name: _typed(kind, parsed[name]) for name, kind in self.fields.items()}
        return {**others, **check_values(self.fields, values)}

    def error(self, message: str) -> NoReturn:
        """Raise InputError with `message`; argparse calls this for invalid command lines."""
        raise InputError(f"{message}; --help lists the flags")


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
