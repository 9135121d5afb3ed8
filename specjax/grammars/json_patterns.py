"""Regular expressions of the JSON strings in which a `pattern` of JSON Schema is found."""

from __future__ import annotations

import re
import warnings
from typing import Any

from specjax.errors import InputError, shown
from specjax.grammars.characters import DIGITS, SPACES, WORD, Ranges, joined, others
from specjax.grammars.expressions import either, repeat
from specjax.grammars.json_strings import ANY, char_text

_MAX_DEPTH = 40  # Python compiles groups in groups by recursion
# What some take for a space, and what all do.
_SPACES: Ranges = [
    *((9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_BEYOND_ASCII: Ranges = [(0x80, 0x10FFFF)]
# Characters of a category for all who read patterns, Python and ECMAScript, and for at least one.
_CATEGORIES: dict[str, tuple[Ranges, Ranges]] = {
    "DIGIT": (DIGITS, DIGITS + _BEYOND_ASCII),
    "WORD": (WORD, WORD + _BEYOND_ASCII),
    "SPACE": (SPACES, _SPACES),
}
_CATEGORIES |= {
    f"NOT_{name}": (others(more), others(sure)) for name, (sure, more) in _CATEGORIES.items()
}


def pattern_text(pattern: str, least: int, most: int | None, path: str) -> str:
    """Return the expression of strings, with quotation marks, in which `pattern` is found.

    Args:
        pattern: A regular expression as `pattern` of JSON Schema has it, not anchored by itself.
        least: The smallest number of characters.
        most: The largest number of characters, or None.
        path: What error messages call the pattern.

    Raises:
        InputError: The pattern is invalid, not regular, or does not fit the lengths.

    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parsed = re._parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise InputError(f"{path}={shown(pattern)} is no regular expression: {error}") from None
    reader = _PatternReader(pattern, path)
    if parsed.state.flags & ~re.UNICODE:
        raise reader.refusal("a flag", "leave it out")
    items = list(parsed)
    if (least, most) != (0, None):
        items = reader.within(items, parsed, least, most)
    text = reader.sequence(items, True, True)
    if text is None:
        raise InputError(f"{path}={shown(pattern)} matches no text: change it")
    return f'"{text}"'


class _PatternReader:
    """Translates the tree of a parsed pattern to an expression of JSON strings."""

    def __init__(self, pattern: str, path: str) -> None:
        self._pattern = pattern
        self._path = path
        self._depth = 0

    def refusal(self, what: str, remedy: str) -> InputError:
        """Return the error of a pattern that has something."""
        return InputError(f"{self._path}={shown(self._pattern)} has {what}: {remedy}")

    def within(self, items: list[Any], parsed: Any, least: int, most: int | None) -> list[Any]:
        """Return the items with the one repetition that is not of a fixed length limited."""
        low, high = parsed.getwidth()
        names = [str(op) for op, _ in items]
        anchors = [str(where) for op, where in items if str(op) == "AT"]
        refusal = self.refusal(
            "other lengths than minLength and maxLength",
            "anchor it by ^ and $ and give its lengths in braces, such as ^[a-z]{1,8}$",
        )
        if not (len(items) > 1 and (names[0], names[-1]) == ("AT", "AT") and len(anchors) == 2):
            raise refusal
        if anchors != ["AT_BEGINNING", "AT_END"]:
            raise refusal
        if least <= low and (most is None or high <= most):
            return items
        widths = [_width(item, parsed) for item in items]
        loose = [index for index, (a, b) in enumerate(widths) if a != b]
        index = loose[0] if loose else 0
        if len(loose) != 1 or names[index] not in ("MAX_REPEAT", "MIN_REPEAT"):
            raise refusal
        op, (a, b, inner) = items[index]
        if inner.getwidth() != (1, 1):
            raise refusal
        fixed = sum(low for where, (low, _) in enumerate(widths) if where != index)
        a = max(a, least - fixed)
        b = b if most is None else min(b, most - fixed)
        if a > b:
            raise refusal
        return [*items[:index], (op, (a, b, inner)), *items[index + 1 :]]

    def sequence(self, items: list[Any], left: bool, right: bool) -> str | None:
        """Return the expression of items one after another; None if it matches nothing.

        `left` and `right` say that it begins, or ends, where the pattern does: there any text may
        be, unless there is an anchor.
        """
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.refusal(f"more than {_MAX_DEPTH} groups in each other", "use fewer")
        before = after = ""
        if left and items and _is_anchor(items[0], "AT_BEGINNING"):
            items, left = items[1:], False
        if right and items and _is_anchor(items[-1], "AT_END"):
            items, right = items[:-1], False
        if left and (not items or not _has_anchors(items[0])):
            before, left = repeat(ANY, 0, None), False
        if right and (not items or not _has_anchors(items[-1])):
            # Once is enough where nothing is between.
            after, right = repeat(ANY, 0, None) if items or not before else "", False
        end = len(items) - 1
        texts = [
            self._item(item, left and index == 0, right and index == end)
            for index, item in enumerate(items)
        ]
        self._depth -= 1
        return None if None in texts else before + "".join(texts) + after

    def _item(self, item: tuple[Any, Any], left: bool, right: bool) -> str | None:
        name, value = str(item[0]), item[1]
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return char_text(_characters(name, value))
            case "BRANCH":
                texts = [self.sequence(list(branch), left, right) for branch in value[1]]
                texts = [text for text in texts if text is not None]
                return either(texts) if texts else None
            case "SUBPATTERN":
                if value[1] or value[2]:
                    raise self.refusal("a flag", "leave it out")
                text = self.sequence(list(value[3]), left, right)
                return None if text is None else f"(?:{text})" if text else ""
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                text = self.sequence(list(inner), False, False)
                if text is None:
                    return None if least else ""
                return repeat(text, least, None if most is re._constants.MAXREPEAT else most)
            case "AT":
                raise self.refusal(
                    "an anchor inside, or a word boundary", "use ^ and $ at its ends"
                )
            case _:
                raise self.refusal(
                    name.lower().replace("_", " "),
                    "use no look-around, references or atomic groups",
                )


def _width(item: tuple[Any, Any], parsed: Any) -> tuple[int, int]:
    """Return the smallest and largest number of characters of an item of a parsed pattern."""
    return re._parser.SubPattern(parsed.state, [item]).getwidth()


def _is_anchor(item: tuple[Any, Any], which: str) -> bool:
    return (str(item[0]), str(item[1])) == ("AT", which)


def _has_anchors(item: tuple[Any, Any]) -> bool:
    """Return whether a group or alternatives have anchors of their own."""
    if str(item[0]) == "BRANCH":
        return any(_has_anchors(inner) for branch in item[1][1] for inner in branch)
    if str(item[0]) == "SUBPATTERN":
        return any(map(_has_anchors, item[1][3]))
    return str(item[0]) == "AT"


def _characters(name: str, value: Any) -> Ranges:
    """Return the characters that an item of one character surely matches."""
    if name == "LITERAL":
        return [(value, value)]
    if name == "NOT_LITERAL":
        return others([(value, value)])
    if name == "ANY":
        return others(_LINE_ENDS)
    negated = str(value[0][0]) == "NEGATE"
    found: Ranges = []
    for kind, inner in value[negated:]:
        match str(kind):
            case "LITERAL":
                found.append((inner, inner))
            case "RANGE":
                found.append(inner)
            case _:
                # What is excluded is all that anyone takes to be in the category.
                found += _CATEGORIES[str(inner).removeprefix("CATEGORY_")][negated]
    return others(found) if negated else joined(found)
