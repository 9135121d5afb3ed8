"""Fields of files by name and type: the one reader of config.json and of a GGUF's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.errors import InputError, shown

_LARGEST = 10**30  # JSON has whole numbers that no float holds
_LARGEST_COUNT = 2**31 - 1


class Fields:
    """The fields of one object of a file, read by name; `asked` are the names that were read.

    `where` names file and object in errors, `prefix` begins the names there ("llama."), and
    `remedy` ends the error for a value of another type. A field that is null counts as missing.
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
        """A field's value as it is, None where it is missing; it counts as read."""
        self.asked.add(name)
        return self.values.get(name)

    def fail(self, name: str, problem: str) -> InputError:
        """The error for a field's value."""
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
        """A whole number of at least 1."""
        value = self._typed(name, default, (int,), wanted := "a whole number of at least 1")
        if not 0 < value <= _LARGEST_COUNT:
            raise self.fail(name, f"must be {wanted}; {self.remedy}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of any size; whether it may be so large, the config says."""
        return self._typed(name, default, (int,), "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        return float(self._typed(name, default, (int, float), "a number"))

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number, or None where the field is null; missing it is `default`."""
        if self.get(name) is None:
            return None if name in self.values else default
        return self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false, by default false."""
        return self._typed(name, bool(default), (bool,), "true or false")

    def text(self, name: str, default: str) -> str:
        """A text."""
        return self._typed(name, default, (str,), "a text")

    def section(self, name: str) -> Fields:
        """An object within this one; empty where there is none."""
        value = self._typed(name, {}, (dict,), "a JSON object")
        return Fields(f"{self.where}: {name}", value, self.remedy)

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is missing or an empty list."""
        value = self._typed(name, [], (list,), wanted := "a list of whole numbers")
        if any(type(item) is not int for item in value):
            raise self.fail(name, f"must be {wanted}; {self.remedy}")
        return value or None

    def only(self, name: str, *allowed: Any) -> None:
        """Raise InputError unless a field is missing or one of the `allowed` values."""
        value = self.get(name)
        comparable = value is None or isinstance(value, bool | int | float | str)
        if not comparable or value not in (None, *allowed):
            supported = " or ".join(map(shown, allowed))
            raise self.fail(name, f"is not supported; only {supported} is")

    def unknown(self, names: list[str], remedy: str) -> InputError:
        """The error for fields that nothing reads."""
        listed = ", ".join(names[:8])
        return self.fail(names[0], f"is unknown ({len(names)} such in all: {listed}); {remedy}")


def is_number(value: Any) -> bool:
    """Whether a value is a number (not true or false) that a float holds, and not NaN."""
    return type(value) in (int, float) and abs(value) <= _LARGEST


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, false, 0, "", [] or {}."""
    return value is None or value in (False, 0, "", [], {})
