"""Fields of files by name and type, for the readers of config.json and GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.errors import InputError, shown

_LARGEST = 10**30  # JSON has whole numbers that no float holds
_LARGEST_COUNT = 2**31 - 1


class Fields:
    """The fields of an object in a file, read by name; `asked` are the names read so far.

    `where` names file and object in errors, `prefix` precedes the names ("llama."), and `remedy`
    ends the error for a value of the wrong type. A null field counts as missing. The methods that
    return a field raise InputError for a value of another type, and for a missing field without a
    default.
    """

    def __init__(
        self,
        where: str,
        values: Mapping[str, Any],
        remedy: str = "repair config.json",
        prefix: str = "",
    ) -> None:
        self.where, self.values, self.remedy, self.prefix = where, values, remedy, prefix
        self.asked = set[str]()

    def get(self, name: str) -> Any:
        """Return the value of the field `name` unchecked, or None if it is missing.

        The field then counts as read.
        """
        self.asked.add(name)
        return self.values.get(name)

    def fail(self, name: str, problem: str) -> InputError:
        """Return an InputError for the field `name` that states its value and the problem."""
        value = shown(self.get(name), 200)
        return InputError(f"{self.where}: {self.prefix}{name}={value}: {problem}")

    def _typed(self, name: str, default: Any, types: tuple[type, ...], wanted: str) -> Any:
        value = self.get(name)
        value = default if value is None else value
        too_large = type(value) in (int, float) and not is_number(value)
        if type(value) not in types or too_large:
            raise self.fail(name, f"must be {wanted}; {self.remedy}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return the field `name`, a whole number of at least 1; `default` if it is missing."""
        value = self._typed(name, default, (int,), wanted := "a whole number of at least 1")
        if not 0 < value <= _LARGEST_COUNT:
            raise self.fail(name, f"must be {wanted}; {self.remedy}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the field `name`, any whole number; `default` if it is missing."""
        return self._typed(name, default, (int,), "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """Return the field `name`, a number, as a float; `default` if it is missing."""
        return float(self._typed(name, default, (int, float), "a number"))

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return the field `name`, a number: None if it is null, `default` if it is missing."""
        if self.get(name) is None:
            return None if name in self.values else default
        return self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return the field `name`, a boolean; if it is missing, `default` or else False."""
        return self._typed(name, bool(default), (bool,), "true or false")

    def text(self, name: str, default: str) -> str:
        """Return the field `name`, a string; `default` if it is missing."""
        return self._typed(name, default, (str,), "a text")

    def section(self, name: str) -> Fields:
        """Return the nested object `name` as `Fields`, which are empty if it is missing."""
        value = self._typed(name, {}, (dict,), "a JSON object")
        return Fields(f"{self.where}: {name}", value, self.remedy)

    def integers(self, name: str) -> list[int] | None:
        """Return the field `name`, a list of whole numbers, or None if missing or empty."""
        value = self._typed(name, [], (list,), wanted := "a list of whole numbers")
        if any(type(item) is not int for item in value):
            raise self.fail(name, f"must be {wanted}; {self.remedy}")
        return value or None

    def only(self, name: str, *allowed: Any) -> None:
        """Raise InputError unless the field `name` is missing or one of the `allowed` values."""
        value = self.get(name)
        comparable = value is None or isinstance(value, bool | int | float | str)
        if not comparable or value not in (None, *allowed):
            supported = " or ".join(map(shown, allowed))
            raise self.fail(name, f"is not supported; only {supported} is")

    def unknown(self, names: list[str], remedy: str) -> InputError:
        """Return an InputError for the fields `names`, which specjax does not know."""
        listed = ", ".join(names[:8])
        return self.fail(names[0], f"is unknown ({len(names)} such in all: {listed}); {remedy}")


def is_number(value: Any) -> bool:
    """Return whether a value is a number, not NaN or a boolean, that a float can represent."""
    return type(value) in (int, float) and abs(value) <= _LARGEST


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, false, 0, "", [] or {}."""
    return value is None or value in (False, 0, "", [], {})
