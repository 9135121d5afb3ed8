"""The regular expression of the JSON texts that are valid under a JSON Schema (2020-12).

    schema_pattern({"type": "object", "properties": {"age": {"type": "integer"}}})

Every text that the expression matches in full parses and is valid. Not every valid text matches:
each value is written in one way, as `json.dumps` lays it out; properties come in the schema's
order; recursion ends; and only the properties that the schema names are written, unless it has a
schema for others. Nothing is ignored: what a regular expression cannot express is refused.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from specjax.errors import InputError, shown
from specjax.grammars.json_texts import (
    BOOLEAN,
    FORMATS,
    NULL,
    STRING,
    any_text,
    either,
    literal,
    number_text,
    optional,
    other_key,
    pattern_text,
    repeat,
    string_text,
)

LARGEST = 200_000
"""The length above which a pattern is refused, in characters."""
_MAX_OPEN = 3  # of the same reference, one inside the other
_MAX_DEPTH = 32  # of values in values: Python compiles groups in groups by recursion
_MAX_VALUES = 20_000
_MAX_CASES = 1_000
_MAX_COUNT = 65_535
_MAX_PERMUTED = 5

_ANNOTATIONS = frozenset(
    "title description default examples $schema $id $comment deprecated readOnly writeOnly "
    "$defs definitions".split()
)
_ALL_KINDS = ("string", "integer", "fraction", "boolean", "null", "array", "object")
# A number is an integer or a fraction: kinds do not overlap, so that they can be intersected.
_KINDS = {"number": ("integer", "fraction")} | {
    kind: (kind,) for kind in _ALL_KINDS if kind != "fraction"
}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_PAIRS = (
    *((f"min{of}", f"max{of}") for of in ("Length", "Items", "Properties")),
    *itertools.product(_LOWER, _UPPER),
)
_NUMERIC = (*_LOWER, *_UPPER, "multipleOf")
_OF_KIND = {
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
_NUMBER = ("a number", _is_number)
_SCHEMA = ("a schema: an object, true or false", _is_schema)
_SCHEMAS = ("a list of at least one schema", _are_schemas)
_TEXT = ("a string", lambda value: isinstance(value, str))
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
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


class _Nothing(InputError):
    """No text is left of a schema: it is false, contradicts another, or its recursion ends."""


@dataclass(frozen=True)
class _Part:
    """A schema that a value must satisfy, beside others, and where it is."""

    schema: Any
    path: str

    def sub(self, *keys: str | int) -> _Part:
        """Return the schema at `keys` in this one."""
        schema, path = self.schema, self.path
        for key in keys:
            schema = schema[key]
            path += f"[{key}]" if isinstance(key, int) else f".{key}"
        return _Part(schema, path)


@dataclass(frozen=True)
class _Case:
    """Schemas that a value must satisfy all, of which only keywords of types, enum and const count.

    `opened` are the references, with repetitions, through which these schemas were reached.
    """

    parts: tuple[_Part, ...]
    opened: tuple[str, ...]

    def given(self, *keywords: str) -> list[_Part]:
        """Return the values of these keywords, and where each is."""
        return [part.sub(key) for part in self.parts for key in keywords if key in part.schema]

    def limits(self, of: str) -> tuple[int, int | None]:
        """Return the largest `min...` and the smallest `max...` of the schemas."""
        least = max((int(part.schema) for part in self.given(f"min{of}")), default=0)
        most = min((int(part.schema) for part in self.given(f"max{of}")), default=None)
        if most is not None and least > most:
            raise _Nothing(f"{self.path}: min{of}={least} is above max{of}={most}: change one")
        return least, most

    @property
    def path(self) -> str:
        """Where the first of the schemas is."""
        return self.parts[0].path if self.parts else ""

    def kinds(self) -> set[str]:
        """Return the kinds of values that `type`, `enum` and `const` leave."""
        kinds = set(_ALL_KINDS)
        for part in self.given("type"):
            names = part.schema if isinstance(part.schema, list) else [part.schema]
            kinds &= {kind for name in names for kind in _KINDS[name]}
        values = self.values()
        return kinds if values is None else kinds & set(map(_kind, values))

    def values(self) -> list[Any] | None:
        """Return the values that are in every `enum` and equal every `const`; None without any."""
        lists = [part.schema for part in self.given("enum")]
        lists += [[part.schema] for part in self.given("const")]
        if not lists:
            return None
        found: dict[str, Any] = {}
        for value in lists[0]:
            found.setdefault(_identity(value), value)
        for others in lists[1:]:
            kept = set(map(_identity, others))
            found = {key: value for key, value in found.items() if key in kept}
        return list(found.values())


def schema_pattern(schema: Any, name: str = "json_schema") -> str:
    """Return the regular expression, in Python's syntax, of the JSON texts valid under a schema.

    Args:
        schema: A JSON Schema: a dictionary, or true.
        name: What error messages call it.

    Returns:
        An expression for the whole text, of literals, classes, groups, `|` and repetitions. Items
        are separated by `", "`, keys from values by `": "`.

    Raises:
        InputError: The schema is invalid, contradicts itself, has a keyword that is not supported,
            or its pattern is too large.
    """
    try:
        schema = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name} must consist of JSON values of moderate depth: {error}") from None
    return _Writer(schema, name).value((_Part(schema, name),), ("#",))


class _Writer:
    """The patterns of the values of one schema."""

    def __init__(self, root: Any, name: str) -> None:
        self._root = root
        self._name = name
        self._values = 0
        self._depth = 0

    def value(self, parts: tuple[_Part, ...], opened: tuple[str, ...]) -> str:
        """Return the pattern of the values that satisfy all `parts`."""
        if not parts:
            return any_text(2)
        self._values += 1
        if self._values > _MAX_VALUES:
            raise self._too_large(f"{self._values:,} values or more", f"{_MAX_VALUES:,}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError(f"{parts[0].path} is nested deeper than {_MAX_DEPTH}: nest less")
        try:
            texts, reason = [], _Nothing(f"{parts[0].path}: no value satisfies it: change it")
            for case in self._cases(parts, opened):
                try:
                    texts.append(self._case(case))
                except _Nothing as error:
                    reason = error
            if not texts:
                raise reason
        finally:
            self._depth -= 1
        text = either(texts)
        if len(text) > LARGEST:
            raise self._too_large(f"a pattern of {len(text):,} characters", f"{LARGEST:,}")
        return text

    def _too_large(self, size: str, limit: str) -> InputError:
        return InputError(
            f"{self._name} is too large: it has {size}, and the limit is {limit}: "
            "use fewer or smaller properties, or less recursion"
        )

    # Alternatives: references, allOf, anyOf and oneOf become cases without them.

    def _cases(self, parts: tuple[_Part, ...], opened: tuple[str, ...]) -> list[_Case]:
        """Return the cases of which a value that satisfies all `parts` satisfies one."""
        cases = [_Case((), opened)]
        for part in parts:
            cases = self._product(cases, self._expand(part, opened), opened)
        return cases

    def _product(
        self, some: list[_Case], others: list[_Case], opened: tuple[str, ...]
    ) -> list[_Case]:
        if len(some) * len(others) > _MAX_CASES:
            size = f"{len(some) * len(others):,} combinations of alternatives"
            raise self._too_large(size, f"{_MAX_CASES:,}")
        return [
            _Case(one.parts + other.parts, one.opened + other.opened[len(opened) :])
            for one, other in itertools.product(some, others)
        ]

    def _expand(self, part: _Part, opened: tuple[str, ...]) -> list[_Case]:
        schema = part.schema
        if isinstance(schema, bool):
            return [_Case((), opened)] if schema else []
        self._check(part)
        cases = [_Case((part,), opened)]
        if "$ref" in schema:
            target = self._target(part)
            if opened.count(target.path) >= _MAX_OPEN:
                raise _Nothing(
                    f"{part.path}.$ref={shown(schema['$ref'])}: this recursion never ends: "
                    "give it an alternative without it, or make the property optional"
                )
            inner = (*opened, target.path)
            cases = self._product(cases, self._expand(self._named(target), inner), opened)
        for index in range(len(schema.get("allOf", []))):
            cases = self._product(cases, self._expand(part.sub("allOf", index), opened), opened)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                cases = self._alternatives(cases, part.sub(keyword), opened)
        return cases

    def _alternatives(self, base: list[_Case], part: _Part, opened: tuple[str, ...]) -> list[_Case]:
        """Return the cases of anyOf or oneOf; an alternative that would recurse is left out."""
        groups, reason = [], None
        for index in range(len(part.schema)):
            try:
                cases = self._expand(part.sub(index), opened)
            except _Nothing as error:
                reason = error
            else:
                groups.append(self._product(base, cases, opened))
        if reason and not any(groups):
            raise reason
        if part.path.endswith(".oneOf"):
            for one, other in itertools.combinations(groups, 2):
                if not self._disjoint(one, other, 2):
                    raise InputError(
                        f"{part.path}={shown(part.schema)}: it is not certain that no value "
                        "satisfies two of the alternatives: use anyOf"
                    )
        return list(itertools.chain(*groups))

    def _disjoint(self, some: list[_Case], others: list[_Case], depth: int) -> bool:
        return all(self._apart(one, other, depth) for one in some for other in others)

    def _apart(self, one: _Case, other: _Case, depth: int) -> bool:
        """Return whether it is certain that no value satisfies both cases."""
        kinds = one.kinds() & other.kinds()
        values, more = one.values(), other.values()
        if values is not None and more is not None:
            return not set(map(_identity, values)) & set(map(_identity, more))
        if kinds != {"object"} or not depth:
            return not kinds
        for part in one.given("required") + other.given("required"):
            for key in part.schema:
                try:
                    found = [self._cases(_property(case, key), ("#",)) for case in (one, other)]
                except _Nothing:
                    continue
                if self._disjoint(*found, depth - 1):
                    return True
        return False

    def _named(self, target: _Part) -> _Part:
        """Return the schema that a reference names, with a path for messages."""
        keys = target.path.removeprefix("#").replace("/", ".")
        return _Part(target.schema, self._name + keys)

    def _target(self, part: _Part) -> _Part:
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
        return _Part(found, pointer)

    def _check(self, part: _Part) -> None:
        """Refuse what is no schema, an unknown keyword, a value of the wrong form."""
        if not isinstance(part.schema, dict):
            raise InputError(f"{part.path}={shown(part.schema)} must be {_SCHEMA[0]}")
        for key, value in part.schema.items():
            if key in _ANNOTATIONS or key.startswith("x-"):
                continue
            if key not in _FORMS:
                remedy = _REMEDIES.get(key, "leave it out")
                raise InputError(f"{part.path}.{key}={shown(value)} is not supported: {remedy}")
            form, holds = _FORMS[key]
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
                raise InputError(
                    f"{part.path}.{low}={shown(least)} must be at most {high}={shown(most)}"
                )

    # Values of one case.

    def _case(self, case: _Case) -> str:
        kinds, values = case.kinds(), case.values()
        if values is not None:
            return self._enumerated(case, values, kinds)
        if not case.given("type"):
            kinds = {kind for kind, keys in _OF_KIND.items() if case.given(*keys)}
            if not kinds:
                return any_text(2)
        texts, reason = [], _Nothing(f"{case.path}: no value satisfies all of it: change it")
        for kind in _ALL_KINDS:
            # Integers are numbers.
            if kind in kinds and not (kind == "integer" and "fraction" in kinds):
                try:
                    texts.append(self._of_kind(kind, case))
                except _Nothing as error:
                    reason = error
        if not texts:
            raise reason
        return either(texts)

    def _of_kind(self, kind: str, case: _Case) -> str:
        match kind:
            case "null":
                return NULL
            case "boolean":
                return BOOLEAN
            case "string":
                return _string(case)
            case "array":
                return self._array(case)
            case "object":
                return self._object(case)
            case _:
                return _number(case, whole=kind == "integer")

    def _enumerated(self, case: _Case, values: list[Any], kinds: set[str]) -> str:
        """Return the pattern of those of `values` that other keywords allow."""
        texts = {kind: [] for kind in kinds}
        for value in values:
            if _kind(value) in kinds:
                texts[_kind(value)].append(json_text(value))
        kept = []
        for kind, found in texts.items():
            if case.given(*_OF_KIND.get(kind, ())):
                rest = re.compile(self._of_kind(kind, case))
                found = [text for text in found if rest.fullmatch(text)]
            kept += found
        if not kept:
            raise _Nothing(
                f"{case.path}: none of its values {shown(values)} satisfies its other keywords: "
                "change one"
            )
        order = [json_text(value) for value in values]
        return either([literal(text) for text in sorted(kept, key=order.index)])

    def _array(self, case: _Case) -> str:
        least, most = case.limits("Items")
        if any(part.schema for part in case.given("uniqueItems")) and (most is None or most > 1):
            return self._permuted(case, least, most)
        firsts = max((len(part.schema) for part in case.given("prefixItems")), default=0)
        texts: list[str] = []
        for index in range(firsts if most is None else min(firsts, most)):
            try:
                texts.append(self.value(_item(case, index), case.opened))
            except _Nothing:
                if index < least:
                    raise
                most = index
                break
        count = len(texts)
        rest = None
        if count == firsts and (most is None or most > count):
            rest = self._rest(case, firsts, least)
        if rest is None:
            most = count
        if least > count and rest is None:
            raise _Nothing(f"{case.path}: its items cannot be {least} or more: change minItems")
        more = None if most is None else most - count
        if not count:
            text = "" if rest is None else _list_text(rest, least, most)
            return rf"\[{text}\]"
        text = "" if rest is None else repeat(f", {rest}", max(least - count, 0), more)
        for index in reversed(range(count)):
            text = (", " if index else "") + texts[index] + text
            text = text if index < least else optional(text)
        return rf"\[{text}\]"

    def _rest(self, case: _Case, firsts: int, least: int) -> str | None:
        """Return the pattern of the items after the first ones that have schemas of their own."""
        parts = _item(case, firsts)
        if not parts:
            return any_text(1) if least > firsts or not firsts else None
        try:
            return self.value(parts, case.opened)
        except _Nothing:
            if least > firsts:
                raise
            return None

    def _permuted(self, case: _Case, least: int, most: int | None) -> str:
        """Return the pattern of arrays of different values, of few that are listed."""
        part = next(part for part in case.given("uniqueItems") if part.schema)
        cases = self._cases(_item(case, 0), case.opened)
        values = {
            _identity(value): value for found in cases for value in found.values() or []
        }
        finite = all(found.values() is not None for found in cases)
        texts = list(map(json_text, values.values()))
        if not finite or len(texts) > _MAX_PERMUTED or case.given("prefixItems"):
            raise InputError(
                f"{part.path}=True needs items with an enum of at most {_MAX_PERMUTED} values, "
                "or maxItems of at most 1: leave it out"
            )
        allowed = re.compile(self.value(_item(case, 0), case.opened))
        texts = [text for text in texts if allowed.fullmatch(text)]
        most = len(texts) if most is None else min(most, len(texts))
        if least > most:
            raise _Nothing(f"{case.path}.minItems={least} is more than there are values: lower it")
        return rf"\[{_arrangements(texts, least, most, '')}\]"

    def _object(self, case: _Case) -> str:
        named = dict.fromkeys(key for part in case.given("properties") for key in part.schema)
        required = dict.fromkeys(key for part in case.given("required") for key in part.schema)
        keys = list(named | required)
        members = {}
        for key in keys:
            try:
                text = self.value(_property(case, key), case.opened)
            except _Nothing as error:
                if key in required:
                    reason = f"{case.path}: no value for the required property {shown(key)}"
                    raise _Nothing(f"{reason}: {error}") from None
            else:
                members[key] = f"{literal(json_text(key))}: {text}"
        least, most = case.limits("Properties")
        free = self._additional(case, keys)
        if most == len(required):
            members = {key: text for key, text in members.items() if key in required}
            free = None
        elif most is not None and most < len(required):
            raise _Nothing(f"{case.path}.maxProperties={most} is below required: raise it")
        elif most == 1:
            alone = [*members.values(), *([free] if free else [])]
            members, free = ({"": either(alone)} if alone else {}), None
        elif most is not None and most < len(members):
            raise InputError(
                f"{case.path}.maxProperties={most} is below the number of properties: leave it out"
            )
        if least > max(len(required), 1):
            raise InputError(
                f"{case.path}.minProperties={least} is above the number of required properties: "
                "leave it out, or name properties in required"
            )
        room = None if most is None else most - len(members)
        text = _members_text(
            [(text, key in required) for key, text in members.items()],
            None if room == 0 else free,
            room,
        )
        if least and not text:
            raise _Nothing(f"{case.path}.minProperties={least}, and there are none: leave it out")
        return rf"\{{{text if least or required else optional(text)}\}}"

    def _additional(self, case: _Case, keys: list[str]) -> str | None:
        """Return the pattern of a member with none of `keys`; None where none is written."""
        parts = tuple(case.given("additionalProperties"))
        # True says no more than that others are valid.
        told = [part for part in parts if part.schema is not True and part.schema != {}]
        if not told and (keys or (not parts and case.given("properties"))):
            return None
        try:
            text = self.value(parts, case.opened) if told else any_text(1)
        except _Nothing:
            return None
        return f"{other_key(keys)}: {text}"


def _property(case: _Case, key: str) -> tuple[_Part, ...]:
    """Return the schemas that the value of the property `key` must satisfy."""
    found = []
    for part in case.parts:
        if key in part.schema.get("properties", {}):
            found.append(part.sub("properties", key))
        elif "additionalProperties" in part.schema:
            found.append(part.sub("additionalProperties"))
    return tuple(found)


def _item(case: _Case, index: int) -> tuple[_Part, ...]:
    """Return the schemas that the item `index` must satisfy."""
    found = []
    for part in case.parts:
        if index < len(part.schema.get("prefixItems", [])):
            found.append(part.sub("prefixItems", index))
        elif "items" in part.schema:
            found.append(part.sub("items"))
    return tuple(found)


def _members_text(members: list[tuple[str, bool]], free: str | None, room: int | None) -> str:
    """Return the pattern of an object's members, at least one, in order, some of them required.

    Before the first required one a comma follows each, behind it a comma precedes each.
    """
    after = [f", {text}" if needed else optional(f", {text}") for text, needed in members]
    alone = [text for text, _ in members]
    if free is not None:
        after.append(repeat(f", {free}", 0, room))
        alone.append(_list_text(free, 1, room))
    for index, (text, needed) in enumerate(members):
        if needed:
            before = "".join(optional(f"{earlier}, ") for earlier in alone[:index])
            return before + text + "".join(after[index + 1 :])
    return _some(alone, after) if alone else ""


def _some(alone: list[str], after: list[str]) -> str:
    """Return the pattern of at least one of optional members.

    Either the first one written is in the first half, or all are in the second: its size grows
    as n log n, where one alternative for each first member grows as n squared.
    """
    if len(alone) == 1:
        return alone[0]
    half = len(alone) // 2
    first = _some(alone[:half], after[:half]) + "".join(after[half:])
    return either([first, _some(alone[half:], after[half:])])


def _list_text(item: str, least: int, most: int | None) -> str:
    """Return the pattern of `least` to `most` items with commas between them."""
    if most == 0:
        return ""
    text = item + repeat(f", {item}", max(least - 1, 0), None if most is None else most - 1)
    return text if least else optional(text)


def _arrangements(texts: list[str], least: int, most: int, comma: str) -> str:
    """Return the pattern of `least` to `most` of `texts`, each at most once, in any order."""
    if not most:
        return ""
    options = []
    for text in texts:
        others = [other for other in texts if other != text]
        rest = _arrangements(others, max(least - 1, 0), most - 1, ", ")
        options.append(comma + literal(text) + rest)
    return either(options) if least else optional(either(options))


def _string(case: _Case) -> str:
    least, most = case.limits("Length")
    told = {part.schema: part for part in case.given("pattern", "format")}
    if len(told) > 1:
        part = list(told.values())[1]
        raise InputError(f"{part.path}={shown(part.schema)} beside another one: use one of them")
    for value, part in told.items():
        if part.path.endswith(".pattern"):
            return pattern_text(value, least, most, part.path)
        if value not in FORMATS:
            form = _FORMS["format"][0]
            raise InputError(f"{part.path}={shown(value)} is not supported: use {form}")
        low, high = re._parser.parse(FORMATS[value]).getwidth()
        if least > low or (most is not None and most < high):
            raise InputError(f"{part.path}={shown(value)} beside minLength or maxLength: use one")
        return f'"{FORMATS[value]}"'
    return STRING if (least, most) == (0, None) else string_text(least, most)


def _exact(value: float) -> Fraction:
    """Return a bound as it is written, if a float has as many digits, or else the float's value."""
    if isinstance(value, float) and abs(value) < 1e15:
        return Fraction(repr(value))
    return Fraction(value)


def _bounds(case: _Case, keywords: tuple[str, str]) -> list[tuple[Fraction, bool]]:
    inclusive, exclusive = keywords
    bounds = [(_exact(part.schema), False) for part in case.given(inclusive)]
    return bounds + [(_exact(part.schema), True) for part in case.given(exclusive)]


def _number(case: _Case, whole: bool) -> str:
    """Return the pattern of numbers between the bounds that are multiples of `multipleOf`."""
    low = max(_bounds(case, _LOWER), default=None)
    highs = _bounds(case, _UPPER)
    high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
    steps = {Fraction(str(part.schema)): part for part in case.given("multipleOf")}
    step = next(iter(steps), None)
    text = None if len(steps) > 1 else number_text(low, high, step, whole)
    if text is None:
        part = list(steps.values())[-1]
        raise InputError(
            f"{part.path}={shown(part.schema)} is not supported here: use a power of ten, or "
            "bounds with few multiples between them, or leave it out"
        )
    if not text:
        raise _Nothing(f"{case.path}: no number is within its bounds: change one")
    return text


def _kind(value: Any) -> str:
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


def _identity(value: Any) -> str:
    """Return a text that two JSON values share if they are equal: 1 is 1.0, and not true."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return int(value) if isinstance(value, float) and value == int(value) else value

    return json.dumps(plain(value), sort_keys=True)


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
