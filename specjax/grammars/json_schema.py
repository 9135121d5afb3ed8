"""The regular expression of the JSON texts that are valid under a JSON Schema (2020-12).

    schema_pattern({"type": "object", "properties": {"age": {"type": "integer"}}})

Every text that the expression matches in full parses and is valid. Not every valid text matches:
each value is written in one way, as `json.dumps` lays it out; properties come in the schema's
order; recursion ends; and only the properties that the schema names are written, unless it has a
schema for others. Nothing is ignored: what a regular expression cannot express is refused.
"""

from __future__ import annotations

import functools
import json
import re
from fractions import Fraction
from typing import Any

from specjax.errors import InputError, one_line, shown
from specjax.files.json_files import parse_json
from specjax.grammars.expressions import either, literal, optional, repeat
from specjax.grammars.json_cases import (
    ALL_KINDS,
    FORMS,
    OF_KIND,
    Case,
    Cases,
    Nothing,
    Part,
    item_of,
    json_text,
    property_of,
)
from specjax.grammars.json_numbers import NUMBER, number_text
from specjax.grammars.json_patterns import pattern_text
from specjax.grammars.json_strings import FORMATS, KEY, STRING, other_key, string_text

LARGEST = 200_000
"""The length above which a pattern is refused, in characters."""
_MAX_DEPTH = 32  # of values in values: Python compiles groups in groups by recursion
_MAX_PERMUTED = 5
_NULL = "null"
_BOOLEAN = "(?:true|false)"


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
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name} must be a value of JSON: {one_line(error)}") from None
    # A copy, of JSON's types alone.
    schema = parse_json(text, name, "use values of JSON, and nest less")
    try:
        return _Writer(schema, name).value((Part(schema, name),), ("#",))
    except RecursionError:  # where the caller has used much of the stack
        raise InputError(f"{name} is nested too deeply: nest less") from None


class _Writer:
    """The patterns of the values of one schema."""

    def __init__(self, root: Any, name: str) -> None:
        self._cases = Cases(root, name)
        self._depth = 0
        self._size = 0

    def value(self, parts: tuple[Part, ...], opened: tuple[str, ...]) -> str:
        """Return the pattern of the values that satisfy all `parts`."""
        if not parts:
            return any_text(2)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InputError(f"{parts[0].path} is nested deeper than {_MAX_DEPTH}: nest less")
        outer, self._size = self._size, 0
        try:
            texts, reason = [], Nothing(f"{parts[0].path}: no value satisfies it: change it")
            for case in self._cases.cases(parts, opened):
                try:
                    texts.append(self._case(case))
                except Nothing as error:
                    reason = error
            if not texts:
                raise reason
        finally:
            self._depth -= 1
            self._size = outer
        text = either(texts)
        # Of all the values in the same one, which has their patterns in its own.
        self._size += len(text)
        if self._size > LARGEST:
            size = f"a pattern of {self._size:,} characters or more"
            raise self._cases.too_large(size, f"{LARGEST:,}")
        return text

    def _case(self, case: Case) -> str:
        kinds = case.kinds
        if case.listed is not None:
            return self._enumerated(case, list(case.listed.values()))
        if not case.given("type"):
            kinds = {kind for kind, keys in OF_KIND.items() if case.given(*keys)}
            if not kinds:
                return any_text(2)
        texts, reason = [], Nothing(f"{case.path}: no value satisfies all of it: change it")
        for kind in ALL_KINDS:
            # Integers are numbers.
            if kind in kinds and not (kind == "integer" and "fraction" in kinds):
                try:
                    texts.append(self._of_kind(kind, case))
                except Nothing as error:
                    reason = error
        if not texts:
            raise reason
        return either(texts)

    def _of_kind(self, kind: str, case: Case) -> str:
        match kind:
            case "null":
                return _NULL
            case "boolean":
                return _BOOLEAN
            case "string":
                return _string(case)
            case "array":
                return self._array(case)
            case "object":
                return self._object(case)
            case _:
                return _number(case, whole=kind == "integer")

    def _enumerated(self, case: Case, values: list[Any]) -> str:
        """Return the pattern of those of `values` that other keywords allow."""
        texts = [literal(json_text(value)) for value in values if self._cases.holds(value, case)]
        if not texts:
            raise Nothing(
                f"{case.path}: none of its values {shown(values)} satisfies its other keywords: "
                "change one"
            )
        return either(texts)

    def _array(self, case: Case) -> str:
        least, most = case.limits("Items")
        if any(part.schema for part in case.given("uniqueItems")) and (most is None or most > 1):
            return self._permuted(case, least, most)
        firsts = max((len(part.schema) for part in case.given("prefixItems")), default=0)
        texts: list[str] = []
        for index in range(firsts if most is None else min(firsts, most)):
            try:
                texts.append(self.value(item_of(case, index), case.opened))
            except Nothing:
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
            raise Nothing(f"{case.path}: its items cannot be {least} or more: change minItems")
        more = None if most is None else most - count
        if not count:
            text = "" if rest is None else _list_text(rest, least, most)
            return rf"\[{text}\]"
        text = "" if rest is None else repeat(f", {rest}", max(least - count, 0), more)
        for index in reversed(range(count)):
            text = (", " if index else "") + texts[index] + text
            text = text if index < least else optional(text)
        return rf"\[{text}\]"

    def _rest(self, case: Case, firsts: int, least: int) -> str | None:
        """Return the pattern of the items after the first ones that have schemas of their own."""
        parts = item_of(case, firsts)
        if not parts:
            return any_text(1) if least > firsts or not firsts else None
        try:
            return self.value(parts, case.opened)
        except Nothing:
            if least > firsts:
                raise
            return None

    def _permuted(self, case: Case, least: int, most: int | None) -> str:
        """Return the pattern of arrays of different values, of few that are listed."""
        part = next(part for part in case.given("uniqueItems") if part.schema)
        cases = self._cases.cases(item_of(case, 0))
        values: dict[str, Any] = {}
        for found in cases:
            values |= found.listed or {}
        finite = all(found.listed is not None for found in cases)
        if not finite or len(values) > _MAX_PERMUTED or case.given("prefixItems"):
            raise InputError(
                f"{part.path}=True needs items with an enum of at most {_MAX_PERMUTED} values, "
                "or maxItems of at most 1: leave it out"
            )
        texts = [
            json_text(value)
            for value in values.values()
            if any(self._cases.holds(value, found) for found in cases)
        ]
        most = len(texts) if most is None else min(most, len(texts))
        if least > most:
            raise Nothing(f"{case.path}.minItems={least} is more than there are values: lower it")
        return rf"\[{_arrangements(texts, least, most, '')}\]"

    def _object(self, case: Case) -> str:
        named = dict.fromkeys(key for part in case.given("properties") for key in part.schema)
        required = dict.fromkeys(key for part in case.given("required") for key in part.schema)
        keys = list(named | required)
        members = {}
        for key in keys:
            try:
                text = self.value(property_of(case, key), case.opened)
            except Nothing as error:
                if key in required:
                    reason = f"{case.path}: no value for the required property {shown(key)}"
                    raise Nothing(f"{reason}: {error}") from None
            else:
                members[key] = f"{literal(json_text(key))}: {text}"
        least, most = case.limits("Properties")
        free = self._additional(case, keys)
        if most == len(required):
            members = {key: text for key, text in members.items() if key in required}
            free = None
        elif most is not None and most < len(required):
            raise Nothing(f"{case.path}.maxProperties={most} is below required: raise it")
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
            raise Nothing(f"{case.path}.minProperties={least}, and there are none: leave it out")
        return rf"\{{{text if least or required else optional(text)}\}}"

    def _additional(self, case: Case, keys: list[str]) -> str | None:
        """Return the pattern of a member with none of `keys`; None where none is written."""
        parts = tuple(case.given("additionalProperties"))
        # True says no more than that others are valid.
        told = [part for part in parts if part.schema is not True and part.schema != {}]
        if not told and (keys or (not parts and case.given("properties"))):
            return None
        try:
            text = self.value(parts, case.opened) if told else any_text(1)
        except Nothing:
            return None
        return f"{other_key(keys)}: {text}"


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


def _string(case: Case) -> str:
    least, most = case.limits("Length")
    told = {("pattern", part.schema): part for part in case.given("pattern")}
    told |= {("format", part.schema): part for part in case.given("format")}
    if len(told) > 1:
        part = list(told.values())[1]
        raise InputError(f"{part.path}={shown(part.schema)} beside another one: use one of them")
    for (keyword, value), part in told.items():
        if keyword == "pattern":
            return pattern_text(value, least, most, part.path)
        if value not in FORMATS:
            form = FORMS["format"][0]
            raise InputError(f"{part.path}={shown(value)} is not supported: use {form}")
        low, high = re._parser.parse(FORMATS[value]).getwidth()
        if least > low or (most is not None and most < high):
            raise InputError(f"{part.path}={shown(value)} beside minLength or maxLength: use one")
        return f'"{FORMATS[value]}"'
    return STRING if (least, most) == (0, None) else string_text(least, most)


def _number(case: Case, whole: bool) -> str:
    """Return the pattern of numbers between the bounds that are multiples of `multipleOf`."""
    steps = {Fraction(str(part.schema)): part for part in case.given("multipleOf")}
    step = next(iter(steps), None)
    text = None if len(steps) > 1 else number_text(*case.bounds(), step, whole)
    if text is None:
        part = list(steps.values())[-1]
        raise InputError(
            f"{part.path}={shown(part.schema)} is not supported here: use a power of ten, or "
            "bounds with few multiples between them, or leave it out"
        )
    if not text:
        raise Nothing(f"{case.path}: no number is within its bounds: change one")
    return text


@functools.cache
def any_text(depth: int) -> str:
    """Return the expression of any value with at most `depth` arrays and objects in each other."""
    texts = [STRING, NUMBER, _BOOLEAN, _NULL]
    if depth:
        inner = any_text(depth - 1)
        member = f"{KEY}: {inner}"
        texts.append(rf"\[{optional(inner + repeat(f', {inner}', 0, None))}\]")
        texts.append(rf"\{{{optional(member + repeat(f', {member}', 0, None))}\}}")
    return either(texts)
