"""The schemas that a JSON value must satisfy, without references and combinations.

A value that satisfies a JSON Schema satisfies one of its cases: lists of schemas of which only the
keywords of types count, as `$ref`, `allOf`, `anyOf` and `oneOf` have been resolved.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from specjax.errors import InputError, shown
from specjax.grammars.json_numbers import DIGITS, Bound
from specjax.grammars.json_strings import FORMATS

_MAX_OPEN = 3  # of the same reference, one inside the other
_MAX_CASES = 1_000
_MAX_WORK = 50_000  # cases in all: the largest schemas of strangers take seconds
_MAX_COUNT = 65_535
_MAX_DIGITS = 40  # of bounds: each is a group in a group

_ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "$comment", "$schema", "$id"),
        *("deprecated", "readOnly", "writeOnly", "$defs", "definitions"),
    ]
)
ALL_KINDS = ("string", "integer", "fraction", "boolean", "null", "array", "object")
# A number is an integer or a fraction: kinds do not overlap, so that they can be intersected.
_KINDS = {"number": ("integer", "fraction")} | {
    kind: (kind,) for kind in ALL_KINDS if kind != "fraction"
}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_PAIRS = (
    *((f"min{of}", f"max{of}") for of in ("Length", "Items", "Properties")),
    *itertools.product(_LOWER, _UPPER),
)
_NUMERIC = (*_LOWER, *_UPPER, "multipleOf")
OF_KIND = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _NUMERIC,
    "fraction": _NUMERIC,
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    ),
}
_REMEDIES = {
    "not": "list what is allowed",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "nullable": 'use a list of types, such as ["string", "null"]',
    "patternProperties": "list the properties, or use additionalProperties",
    "additionalItems": "use prefixItems and items",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == int(value) and 0 <= value <= _MAX_COUNT


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _KINDS for name in names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# The form of each keyword's value: what the message says, and the test.
_COUNT = (f"a whole number from 0 to {_MAX_COUNT:,}", _is_count)
_NUMBER = (
    f"a number of at most {_MAX_DIGITS} digits",
    lambda value: _is_number(value) and abs(value) < 10**_MAX_DIGITS,
)
_SCHEMA = ("a schema: an object, true or false", _is_schema)
_SCHEMAS = ("a list of at least one schema", _are_schemas)
_TEXT = ("a string", lambda value: isinstance(value, str))
FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"a type or a list of types, of {', '.join(_KINDS)}", _are_types),
    "enum": ("a list of at least one value", lambda value: isinstance(value, list) and value != []),
    "const": ("a value", lambda value: True),
    "$ref": _TEXT,
    "pattern": _TEXT,
    "format": (f"one of {', '.join(FORMATS)}", lambda value: isinstance(value, str)),
    "items": ("a schema; for items with schemas of their own use prefixItems", _is_schema),
    "additionalProperties": _SCHEMA,
    "properties": ("an object of schemas", _are_named_schemas),
    "required": ("a list of names", _are_names),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    "multipleOf": ("a number above 0", lambda value: _is_number(value) and value > 0),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys((*_LOWER, *_UPPER), _NUMBER),
    **{f"{end}{of}": _COUNT for end in ("min", "max") for of in ("Length", "Items", "Properties")},
}


class Nothing(InputError):
    """No text is left of a schema: it is false, contradicts another, or its recursion ends."""


@dataclass(frozen=True)
class Part:
    """A schema that a value must satisfy, beside others, and where it is."""

    schema: Any
    path: str

    def sub(self, *keys: str | int) -> Part:
        """Return the schema at `keys` in this one."""
        schema, path = self.schema, self.path
        for key in keys:
            schema = schema[key]
            path += f"[{key}]" if isinstance(key, int) else f".{key}"
        return Part(schema, path)


@dataclass(frozen=True)
class Case:
    """Schemas that a value must satisfy all, of which only keywords of types, enum and const count.

    `opened` are the references, with repetitions, through which these schemas were reached.
    """

    parts: tuple[Part, ...]
    opened: tuple[str, ...]

    def given(self, *keywords: str) -> list[Part]:
        """Return the values of these keywords, and where each is."""
        return [part.sub(key) for part in self.parts for key in keywords if key in part.schema]

    def limits(self, of: str) -> tuple[int, int | None]:
        """Return the largest `min...` and the smallest `max...` of the schemas."""
        least = max((int(part.schema) for part in self.given(f"min{of}")), default=0)
        most = min((int(part.schema) for part in self.given(f"max{of}")), default=None)
        if most is not None and least > most:
            raise Nothing(f"{self.path}: min{of}={least} is above max{of}={most}: change one")
        return least, most

    def allows(self, of: str, size: int) -> bool:
        """Return whether `min...` and `max...` allow a size."""
        return all(part.schema <= size for part in self.given(f"min{of}")) and all(
            size <= part.schema for part in self.given(f"max{of}")
        )

    def bounds(self) -> tuple[Bound, Bound]:
        """Return the tightest bounds of numbers."""
        lows, highs = (
            [(exact(part.schema), "excl" in key) for key in keys for part in self.given(key)]
            for keys in (_LOWER, _UPPER)
        )
        high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
        return max(lows, default=None), high

    @property
    def path(self) -> str:
        """Where the first of the schemas is."""
        return self.parts[0].path if self.parts else ""

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of values that `type`, `enum` and `const` leave."""
        kinds = set(ALL_KINDS)
        for part in self.given("type"):
            names = part.schema if isinstance(part.schema, list) else [part.schema]
            kinds &= {kind for name in names for kind in _KINDS[name]}
        listed = self.listed
        return kinds if listed is None else kinds & set(map(kind_of, listed.values()))

    @cached_property
    def listed(self) -> dict[str, Any] | None:
        """The values that are in every `enum` and equal every `const`, by identity; or None."""
        lists = [part.schema for part in self.given("enum")]
        lists += [[part.schema] for part in self.given("const")]
        if not lists:
            return None
        found: dict[str, Any] = {}
        for value in lists[0]:
            found.setdefault(identity(value), value)
        for others in lists[1:]:
            kept = set(map(identity, others))
            found = {key: value for key, value in found.items() if key in kept}
        return found


class Cases:
    """The cases of the schemas in one schema."""

    def __init__(self, root: Any, name: str) -> None:
        self._root = root
        self._name = name
        self._work = 0

    def too_large(self, size: str, limit: str) -> InputError:
        """Return the error of a schema that has more of something than the limit."""
        return InputError(
            f"{self._name} is too large: it has {size}, and the limit is {limit}: "
            "use fewer or smaller properties, or less recursion"
        )

    def cases(self, parts: tuple[Part, ...], opened: tuple[str, ...] = ("#",)) -> list[Case]:
        """Return the cases of which a value that satisfies all `parts` satisfies one.

        Args:
            parts: The schemas.
            opened: The references through which they were reached, with repetitions.

        Returns:
            The cases; none if a schema is false.

        Raises:
            Nothing: A reference would be opened once too often.
            InputError: A schema is invalid or not supported.

        """
        cases = [Case((), opened)]
        for part in parts:
            cases = self._product(cases, self._expand(part, opened, len(opened)), opened)
        self._count(len(cases) + 1)
        return cases

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise self.too_large(f"more than {_MAX_WORK:,} cases", f"{_MAX_WORK:,}")

    def admits(self, value: Any, parts: tuple[Part, ...]) -> bool:
        """Return whether a value satisfies all `parts`, each keyword as JSON Schema means it."""
        return any(self.holds(value, case) for case in self.cases(parts))

    def holds(self, value: Any, case: Case) -> bool:
        """Return whether a value satisfies a case."""
        kind = kind_of(value)
        if kind not in case.kinds or (case.listed and identity(value) not in case.listed):
            return False
        match value:
            case str():
                return self._string_holds(value, case)
            case list():
                items = (self.admits(item, item_of(case, i)) for i, item in enumerate(value))
                unique = any(part.schema for part in case.given("uniqueItems"))
                different = not unique or len(set(map(identity, value))) == len(value)
                return case.allows("Items", len(value)) and different and all(items)
            case dict():
                inner = (self.admits(value[key], property_of(case, key)) for key in value)
                there = all(key in value for part in case.given("required") for key in part.schema)
                return case.allows("Properties", len(value)) and there and all(inner)
        return kind not in ("integer", "fraction") or _number_holds(exact(value), case)

    def _string_holds(self, value: str, case: Case) -> bool:
        # Patterns of strangers are not searched for: Python's `re` may take forever.
        for part in case.given("pattern"):
            raise InputError(f"{part.path}={shown(part.schema)} beside enum or const: leave it out")
        formats = [FORMATS.get(part.schema) for part in case.given("format")]
        fits = all(text is not None and re.fullmatch(text, value) for text in formats)
        return fits and case.allows("Length", len(value))

    def _product(self, some: list[Case], others: list[Case], opened: tuple[str, ...]) -> list[Case]:
        if len(some) * len(others) > _MAX_CASES:
            size = f"{len(some) * len(others):,} combinations of alternatives"
            raise self.too_large(size, f"{_MAX_CASES:,}")
        return [
            Case(one.parts + other.parts, one.opened + other.opened[len(opened) :])
            for one, other in itertools.product(some, others)
        ]

    def _expand(self, part: Part, opened: tuple[str, ...], start: int) -> list[Case]:
        schema = part.schema
        if isinstance(schema, bool):
            return [Case((), opened)] if schema else []
        self._check(part)
        cases = [Case((part,), opened)]
        if "$ref" in schema:
            target = self._target(part)
            said = f"{part.path}.$ref={shown(schema['$ref'])}: this recursion never ends: "
            if target.path in opened[start:]:
                raise InputError(said + "a value would have to satisfy itself: leave it out")
            if opened.count(target.path) >= _MAX_OPEN:
                raise Nothing(said + "give it an alternative, or make the property optional")
            inner = (*opened, target.path)
            cases = self._product(cases, self._expand(self._named(target), inner, start), opened)
        for index in range(len(schema.get("allOf", []))):
            cases = self._product(
                cases, self._expand(part.sub("allOf", index), opened, start), opened
            )
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                cases = self._alternatives(cases, part.sub(keyword), opened, start)
        return cases

    def _alternatives(
        self, base: list[Case], part: Part, opened: tuple[str, ...], start: int
    ) -> list[Case]:
        """Return the cases of anyOf or oneOf; an alternative that would recurse is left out."""
        groups, reason = [], None
        for index in range(len(part.schema)):
            try:
                cases = self._expand(part.sub(index), opened, start)
            except Nothing as error:
                reason = error
            else:
                groups.append(self._product(base, cases, opened))
        if reason and not any(groups):
            raise reason
        if part.path.endswith(".oneOf") and not self._all_disjoint(groups):
            raise InputError(
                f"{part.path}={shown(part.schema)}: it is not certain that no value satisfies two "
                "of the alternatives: use anyOf"
            )
        return list(itertools.chain(*groups))

    def _all_disjoint(self, groups: list[list[Case]]) -> bool:
        """Return whether it is certain that no value satisfies cases of two groups."""
        if all(case.listed is not None for group in groups for case in group):
            # Long lists of constants are quick.
            listed = [{key for case in group for key in case.listed or ()} for group in groups]
            return sum(map(len, listed)) == len(set().union(*listed))
        pairs = itertools.combinations(groups, 2)
        return all(self._disjoint(one, other, 2) for one, other in pairs)

    def _disjoint(self, some: list[Case], others: list[Case], depth: int) -> bool:
        return all(self._apart(one, other, depth) for one in some for other in others)

    def _apart(self, one: Case, other: Case, depth: int) -> bool:
        """Return whether it is certain that no value satisfies both cases."""
        self._count(1)
        kinds = one.kinds & other.kinds
        if one.listed is not None and other.listed is not None:
            return one.listed.keys().isdisjoint(other.listed)
        if kinds != {"object"} or not depth:
            return not kinds
        for part in one.given("required") + other.given("required"):
            for key in part.schema:
                try:
                    found = [self.cases(property_of(case, key)) for case in (one, other)]
                except Nothing:
                    continue
                if self._disjoint(*found, depth - 1):
                    return True
        return False

    def _named(self, target: Part) -> Part:
        """Return the schema that a reference names, with a path for messages."""
        keys = target.path.removeprefix("#").replace("/", ".")
        return Part(target.schema, self._name + keys)

    def _target(self, part: Part) -> Part:
        """Return what a reference names; its path is the reference, unquoted."""
        reference = part.schema["$ref"]
        pointer, found = unquote(reference), self._root
        refusal = InputError(
            f"{part.path}.$ref={shown(reference)} names no schema in this one: "
            "use a reference such as #/$defs/name"
        )
        if pointer != "#" and not pointer.startswith("#/"):
            raise refusal
        for key in pointer.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                raise refusal
        return Part(found, pointer)

    def _check(self, part: Part) -> None:
        """Refuse what is no schema, an unknown keyword, a value of the wrong form."""
        if not isinstance(part.schema, dict):
            raise InputError(f"{part.path}={shown(part.schema)} must be {_SCHEMA[0]}")
        for key, value in part.schema.items():
            if key in _ANNOTATIONS or key.startswith("x-"):
                continue
            if key not in FORMS:
                remedy = _REMEDIES.get(key, "leave it out")
                raise InputError(f"{part.path}.{key}={shown(value)} is not supported: {remedy}")
            form, holds = FORMS[key]
            if not holds(value):
                raise InputError(f"{part.path}.{key}={shown(value)} must be {form}")
        # References in a schema with an address of its own are relative to that.
        nested = "$id" in part.schema and part.schema is not self._root
        if nested and '"$ref"' in json.dumps(part.schema):
            raise InputError(f"{part.path}.$id={shown(part.schema['$id'])}: leave it out")
        for low, high in _PAIRS:
            least, most = part.schema.get(low), part.schema.get(high)
            if least is None or most is None:
                continue
            if least > most or (least == most and "excl" in low + high):
                be = "be below" if "excl" in low + high else "be at most"
                raise InputError(f"{part.path}.{low}={shown(least)} must {be} {high}={shown(most)}")


def property_of(case: Case, key: str) -> tuple[Part, ...]:
    """Return the schemas that the value of the property `key` must satisfy."""
    found = []
    for part in case.parts:
        if key in part.schema.get("properties", {}):
            found.append(part.sub("properties", key))
        elif "additionalProperties" in part.schema:
            found.append(part.sub("additionalProperties"))
    return tuple(found)


def item_of(case: Case, index: int) -> tuple[Part, ...]:
    """Return the schemas that the item `index` must satisfy."""
    found = []
    for part in case.parts:
        if index < len(part.schema.get("prefixItems", [])):
            found.append(part.sub("prefixItems", index))
        elif "items" in part.schema:
            found.append(part.sub("items"))
    return tuple(found)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value; 1.0 is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "integer" if value == int(value) else "fraction"


def identity(value: Any) -> str:
    """Return a text that two JSON values share if they are equal: 1 is 1.0, and not true."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return int(value) if isinstance(value, float) and value == int(value) else value

    # Most values are strings, of which there may be many.
    return f'"{value}' if isinstance(value, str) else json.dumps(plain(value), sort_keys=True)


def json_text(value: Any) -> str:
    """Return a value as JSON; characters are escaped only where they must be."""
    text = json.dumps(value, ensure_ascii=False)
    # Lone surrogates are no characters: they cannot be encoded otherwise.
    return text if text.isascii() or _encodes(text) else json.dumps(value)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def exact(value: float) -> Fraction:
    """Return a number as it is written, if a float keeps its digits, or else the float's value."""
    if isinstance(value, float) and abs(value) < 10**DIGITS:
        return Fraction(repr(value))
    return Fraction(value)


def _number_holds(value: Fraction, case: Case) -> bool:
    low, high = case.bounds()
    above = low is None or value > low[0] or (value == low[0] and not low[1])
    below = high is None or value < high[0] or (value == high[0] and not high[1])
    steps = [Fraction(str(part.schema)) for part in case.given("multipleOf")]
    return above and below and not any(value % step for step in steps)
