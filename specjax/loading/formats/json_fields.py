"""Typed reading of a JSON object's fields; unknown fields are errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specjax.errors import InputError, shown

LARGEST = 10**30  # JSON has whole numbers that no float holds
_LARGEST_COUNT = 2**31 - 1


class Fields:
    """The fields of one JSON object of a config; `where` names the object in errors."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values, self.asked = where, values, set[str]()

    def get(self, name: str) -> Any:
        """A field's value as it is, None where it is missing; it counts as known."""
        self.asked.add(name)
        return self.values.get(name)

    def fail(self, name: str, remedy: str) -> InputError:
        """The error for a field's value."""
        return InputError(f"{self.where}: {name}={shown(self.get(name))}: {remedy}")

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= _LARGEST_COUNT:
            raise self.fail(name, "must be a whole number of at least 1; repair config.json")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of any size; whether it may be so large, the config says."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not int or abs(value) > LARGEST:
            raise self.fail(name, "must be a number; repair config.json")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not abs(value) <= LARGEST:
            raise self.fail(name, "must be a number; repair config.json")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number, or None where the field is null; missing it is `default`."""
        if name in self.values and self.get(name) is None:
            return None
        return default if name not in self.values else self.number(name)

    def only(self, name: str, *allowed: Any) -> None:
        """Raise InputError unless a field is missing, null or one of the `allowed` values."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.fail(
                name, f"is not supported; the decoder supports only {shown(allowed[0])}"
            )

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fail(name, "must be true or false; repair config.json")
        return value

    def section(self, name: str) -> Fields:
        """An object within this one; empty where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, "must be a JSON object; repair config.json")
        return Fields(f"{self.where}: {name}", value or {})

    def layer_ids(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is missing, null or an empty list."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise self.fail(name, "must list layers; repair config.json")
        return value

    def check_known(self, known: Collection[str]) -> None:
        """Raise InputError for a field that is not among the known ones."""
        unknown = sorted(self.values.keys() - set(known))
        if unknown:
            raise self.fail(
                unknown[0],
                f"is unknown ({len(unknown)} such in all: {', '.join(unknown[:8])}); take out of "
                "config.json what does not change what is computed",
            )


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, false, 0, "", [] or {}."""
    return value is None or value in (False, 0, "", [], {})
