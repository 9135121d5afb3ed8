"""Regular expressions of JSON's numbers and strings, and how expressions are put together.

Each function returns an expression that can be put beside others as it is: alternatives are in a
group. Strings are those between the quotation marks, unless it says otherwise.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from fractions import Fraction
from itertools import pairwise
from typing import Any

from specjax.errors import InputError, shown

Ranges = list[tuple[int, int]]
"""A set of characters: the first and last code points of intervals that neither touch nor overlap,
in order."""
Bound = tuple[Fraction, bool] | None
"""A bound of numbers and whether it is exclusive; None for no bound."""

DIGITS = 15
"""How many digits of a decimal a float keeps: different decimals are different floats."""
NULL = "null"
BOOLEAN = "(?:true|false)"
_WHOLE = f"[1-9][0-9]{{0,{DIGITS - 1}}}"
INTEGER = f"(?:0|-?{_WHOLE})"
NUMBER = rf"-?(?:0|{_WHOLE})(?:\.[0-9]{{1,{DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"
_MAX_LISTED = 200  # multiples, each of them an alternative
_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_PLAIN: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
_TOLD_APART = 16  # characters of a key: expressions in expressions are compiled by recursion

_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)

# Putting together


def literal(text: str) -> str:
    """Return the expression of one text."""
    return re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text)


def either(texts: list[str]) -> str:
    """Return the expression of one of `texts`."""
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def optional(text: str) -> str:
    """Return the expression of `text` or nothing."""
    return f"{_one(text)}?" if text else ""


def repeat(text: str, least: int, most: int | None) -> str:
    """Return the expression of `least` to `most` times `text`; any number of times if None."""
    if most == 0:
        return ""
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    end = "" if most is None else str(most)
    count = counts.get((least, most), f"{{{least}}}" if least == most else f"{{{least},{end}}}")
    return f"{_one(text)}{count}"


def _one(text: str) -> str:
    """Return an expression that can be repeated: in a group, unless it is one or a class."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return text if token.end() == len(text) else f"(?:{text})"
    raise ValueError(text)


# Numbers


def whole_text(low: int | None, high: int | None) -> str | None:
    """Return the expression of the integers from `low` to `high`; None if there are none.

    Without a bound they have at most 15 digits, or as many as the other bound.
    """
    if low is None and high is None:
        return INTEGER
    texts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        below = _natural_text(least, None if low is None else -low)
        texts += [f"-{below}"] if below else []
    if high is None or high >= 0:
        above = _natural_text(0 if low is None else max(low, 0), high)
        texts += [above] if above else []
    return either(texts) if texts else None


def _natural_text(low: int, high: int | None) -> str | None:
    if high is None:
        high = 10 ** max(DIGITS, len(str(low))) - 1
    if low > high:
        return None
    texts = ["0"] if low == 0 else []
    low = max(low, 1)
    while low <= high:
        size = len(str(low))
        if low == 10 ** (size - 1) and high >= 10**size - 1:
            # All numbers of this many digits and of more, as long as there are all.
            longest = len(str(high + 1)) - 1
            more = repeat("[0-9]", size - 1, longest - 1)
            texts.append(f"[1-9]{more}")
            low = 10**longest
        else:
            top = min(high, 10**size - 1)
            texts.append(_same_size_text(str(low), str(top)))
            low = top + 1
    return either(texts) if texts else None


def _same_size_text(low: str, high: str) -> str:
    """Return the expression of the numbers from `low` to `high`, of as many digits each."""
    if not low:
        return ""
    rest = len(low) - 1
    nothing, full = "0" * rest, "9" * rest
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _same_size_text(low[1:], high[1:])
    texts = []
    if low[1:] != nothing:
        texts.append(low[0] + _same_size_text(low[1:], full))
        first += 1
    if high[1:] != full:
        texts.append(high[0] + _same_size_text(nothing, high[1:]))
        last -= 1
    if first <= last:
        texts.append(_digit_class(range(first, last + 1)) + repeat("[0-9]", rest, rest))
    return either(texts)


def _digit_class(digits: range | list[int]) -> str:
    if len(digits) == 1:
        return str(digits[0])
    whole = list(digits) == list(range(digits[0], digits[-1] + 1))
    return f"[{digits[0]}-{digits[-1]}]" if whole else f"[{''.join(map(str, digits))}]"


def number_text(low: Bound, high: Bound, step: Fraction | None, whole: bool) -> str | None:
    """Return the expression of the numbers between bounds.

    Args:
        low: The lower bound.
        high: The upper bound.
        step: What all are multiples of, if not None.
        whole: Whether all are integers.

    Returns:
        The expression; `""` if there are no such numbers; None if the expression would be large,
        or floats do not tell the multiples apart.
    """
    if step is None and not whole:
        return _decimals_text(low, high, DIGITS) if low or high else NUMBER
    # An integer that is a multiple of p / q is a multiple of p.
    step = Fraction(1 if step is None else step.numerator) if whole else step
    if step.numerator == 1 and step != 1 and (places := _power_of_ten(step.denominator)):
        return _decimals_text(low, high, places) if places <= DIGITS else None
    first = None if low is None else math.ceil(low[0] / step)
    if low == (first and first * step, True) or low == (0, True):
        first += 1
    last = None if high is None else math.floor(high[0] / step)
    if high == (last and last * step, True) or high == (0, True):
        last -= 1
    if step == 1:
        return whole_text(first, last) or ""
    if first is not None and last is not None and last - first < _MAX_LISTED:
        # Only of powers of two are multiples exact.
        exact = step.denominator & (step.denominator - 1) == 0
        numbers = [index * step for index in range(first, last + 1)]
        texts = [literal(_decimal(number)) for number in numbers]
        return (either(texts) if texts else "") if exact else None
    if step.denominator == 1 and (zeros := _power_of_ten(step.numerator)):
        below = whole_text(first, -1 if last is None else min(last, -1))
        above = whole_text(1 if first is None else max(first, 1), last)
        texts = [f"{text}{'0' * zeros}" for text in (below, above) if text]
        nothing = (first is None or first <= 0) and (last is None or last >= 0)
        texts += ["0"] if nothing else []
        return either(texts) if texts else ""
    if step in (2, 5) and first in (None, 0, 1) and last is None:
        ends = {2: ("[2468]", "[02468]"), 5: ("5", "[05]")}[int(step)]
        sign = "-?" if first is None else ""
        size = DIGITS - 2
        text = f"{sign}(?:{ends[0]}|[1-9][0-9]{{0,{size}}}{ends[1]})"
        return text if first == 1 else f"(?:0|{text})"
    return None


def _power_of_ten(number: int) -> int:
    """Return the exponent, 0 if `number` is no power of ten."""
    zeros = len(str(number)) - 1
    return zeros if number == 10**zeros else 0


def _decimal(number: Fraction) -> str:
    """Return a number whose denominator is a power of two, in digits."""
    places = number.denominator.bit_length() - 1
    digits = str(abs(number.numerator) * 5**places).rjust(places + 1, "0")
    sign = "-" if number < 0 else ""
    return sign + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def _decimals_text(low: Bound, high: Bound, places: int) -> str:
    """Return the expression of decimals between bounds; `""` if there are none.

    What is within a bound as a decimal is within it as a float, as rounding is monotonic, if the
    bound is a float itself; a decimal that is not an exclusive bound is not that bound as a float
    if it has no more digits than floats keep.
    """
    for bound in (low, high):
        if bound and ((bound[1] and bound[0]) or abs(bound[0]) >= 10**DIGITS):
            places = min(places, max(DIGITS - len(str(int(abs(bound[0])))), 0))
    nothing = (Fraction(0), False)
    if low is None and high is None:
        return f"-?{_magnitudes_text(nothing, None, places)}"
    texts = []
    if low is None or low[0] < 0:
        nearest = nothing if high is None or high[0] > 0 else (-high[0], high[1])
        text = _magnitudes_text(nearest, low and (-low[0], low[1]), places)
        texts += [f"-{text}"] if text else []
    if high is None or high[0] >= 0:
        nearest = nothing if low is None or low[0] < 0 else low
        text = _magnitudes_text(nearest, high, places)
        texts += [text] if text else []
    return either(texts) if texts else ""


def _magnitudes_text(low: tuple[Fraction, bool], high: Bound, places: int) -> str | None:
    """Return the expression of decimals that are not negative; None if there are none."""
    first, last = math.floor(low[0]), None if high is None else math.floor(high[0])
    start = (low[0] - first, low[1])
    end = None if high is None else (high[0] - last, high[1])
    nothing = (Fraction(0), False)
    if first == last:
        texts = [_with_fraction(str(first), _fraction_text(start, end, places))]
    else:
        middle = whole_text(
            first if start == nothing else first + 1, None if last is None else last - 1
        )
        texts = [middle and _with_fraction(middle, _fraction_text(nothing, None, places))]
        if start != nothing:
            texts.append(_with_fraction(str(first), _fraction_text(start, None, places)))
        if end is not None:
            texts.append(_with_fraction(str(last), _fraction_text(nothing, end, places)))
    texts = [text for text in texts if text]
    return either(texts) if texts else None


def _with_fraction(whole: str, fraction: tuple[str | None, bool]) -> str | None:
    text, may_be_empty = fraction
    if text is None:
        return whole if may_be_empty else None
    return whole + (optional(rf"\.{text}") if may_be_empty else rf"\.{text}")


def _fraction_text(low: Bound, high: Bound, places: int) -> tuple[str | None, bool]:
    """Return the expression of at most `places` digits behind a point, and whether none will do.

    Args:
        low: The lower bound, at least 0.
        high: The upper bound; None for 1, exclusive.
        places: The largest number of digits.

    Returns:
        The expression of at least one digit, None if there is none, and whether no digit will do.
    """
    least, open_below = max(low, (Fraction(0), False))
    most, open_above = high or (Fraction(1), True)
    fits_zero = (least == 0 and not open_below) and (most > 0 or (most == 0 and not open_above))
    if most < 0 or not places:
        return None, fits_zero
    if fits_zero and most >= 1:
        return f"[0-9]{{1,{places}}}" if places > 1 else "[0-9]", True
    if fits_zero and most == 0:
        return f"0{{1,{places}}}", True
    groups: dict[tuple[str | None, bool], list[int]] = {}
    for digit in range(10):
        under = (10 * least - digit, open_below)
        if under[0] >= 1:
            continue
        # Nothing is below the digits of zero: where the bound is passed, it is no bound.
        under = under if under[0] >= 0 else (Fraction(0), False)
        over = (10 * most - digit, open_above)
        over = over if over[0] < 1 else None
        rest = _fraction_text(under, over, places - 1)
        if rest != (None, False):
            groups.setdefault(rest, []).append(digit)
    texts = []
    for (rest, may_end), digits in groups.items():
        more = "" if rest is None else optional(rest) if may_end else rest
        texts.append(_digit_class(digits) + more)
    return (either(texts) if texts else None), fits_zero


# Characters and strings


def _both(some: Ranges, others: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    found = [(max(a, c), min(b, d)) for a, b in some for c, d in others]
    return sorted((first, last) for first, last in found if first <= last)


def _joined(ranges: Ranges) -> Ranges:
    """Return the set of the characters of intervals that may overlap."""
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _others(ranges: Ranges) -> Ranges:
    """Return the characters that are not in a set."""
    edges = [(-1, -1), *_joined(ranges), (0x110000, 0x110000)]
    return [(a + 1, b - 1) for (_, a), (b, _) in pairwise(edges) if a + 1 < b]


def _class_char(code: int) -> str:
    char = chr(code)
    if char in r"\]^-[":
        return f"\\{char}"
    if 0x20 <= code < 0x7F:
        return char
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else (f"\\U{code:08x}")
    )


def char_text(ranges: Ranges, slash: str = "") -> str | None:
    """Return the expression of one character of a set, as JSON writes it; None if it has none.

    Control characters without a short escape are written only where the set has no others. `slash`
    is `"/"` if a slash may be escaped, too.
    """
    plain = _both(ranges, _PLAIN)
    texts = []
    if plain:
        ends = [(_class_char(first), _class_char(last)) for first, last in plain]
        inside = "".join(a if a == b else f"{a}-{b}" for a, b in ends)
        one = len(plain) == 1 and plain[0][0] == plain[0][1]
        texts.append(literal(chr(plain[0][0])) if one else f"[{inside}]")
    short = [char for code, char in _SHORT.items() if _both(ranges, [(code, code)])]
    if short:
        inside = "".join(short).replace("\\", "\\\\") + slash
        texts.append(rf"\\[{inside}]")
    if not texts:
        codes = [code for code in range(0x20) if _both(ranges, [(code, code)])]
        texts = [rf"\\u{code:04x}" for code in codes]
    return either(texts) if texts else None


_ANY = char_text([(0, 0x10FFFF)])
_ANY_WITH_SLASH = char_text([(0, 0x10FFFF)], "/")
STRING = f'"{repeat(_ANY_WITH_SLASH, 0, None)}"'
KEY = f'"{repeat(_ANY, 0, None)}"'


def string_text(least: int, most: int | None) -> str:
    """Return the expression of strings, with quotation marks, of a number of characters."""
    return f'"{repeat(_ANY_WITH_SLASH, least, most)}"'


def other_key(keys: list[str]) -> str:
    """Return the expression of strings, with quotation marks, that are none of `keys`.

    Of keys that begin like one of `keys` in 16 characters only shorter ones are written.
    """
    return f'"{_other_text(keys, 0)}"' if keys else KEY


def _other_text(keys: list[str], done: int) -> str:
    following: dict[str, list[str]] = {}
    for key in keys:
        if key[done:]:
            following.setdefault(key[done], []).append(key)
    others = char_text(_others([(ord(char), ord(char)) for char in following]))
    texts = [f"{others}{repeat(_ANY, 0, None)}"]
    if done < _TOLD_APART:
        for char, those in following.items():
            if first := char_text([(ord(char), ord(char))]):
                texts.append(first + _other_text(those, done + 1))
    ends = any(len(key) == done for key in keys)
    return either(texts) if ends else optional(either(texts))


# Patterns

_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_DIGITS: Ranges = [(0x30, 0x39)]
# What some take for a space, and what all do.
_SPACES: Ranges = [
    *((9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_SURE_SPACES: Ranges = [(9, 13), (0x20, 0x20)]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_BEYOND_ASCII: Ranges = [(0x80, 0x10FFFF)]
# Characters of a category for all who read patterns, Python and ECMAScript, and for at least one.
_CATEGORIES: dict[str, tuple[Ranges, Ranges]] = {
    "DIGIT": (_DIGITS, _DIGITS + _BEYOND_ASCII),
    "WORD": (_WORD, _WORD + _BEYOND_ASCII),
    "SPACE": (_SURE_SPACES, _SPACES),
}
_CATEGORIES |= {
    f"NOT_{name}": (_others(more), _others(sure)) for name, (sure, more) in _CATEGORIES.items()
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
        before = after = ""
        if left and items and _is_anchor(items[0], "AT_BEGINNING"):
            items, left = items[1:], False
        if right and items and _is_anchor(items[-1], "AT_END"):
            items, right = items[:-1], False
        if left and (not items or not _has_anchors(items[0])):
            before, left = repeat(_ANY, 0, None), False
        if right and (not items or not _has_anchors(items[-1])):
            # Once is enough where nothing is between.
            after, right = repeat(_ANY, 0, None) if items or not before else "", False
        end = len(items) - 1
        texts = [
            self._item(item, left and index == 0, right and index == end)
            for index, item in enumerate(items)
        ]
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
        return _others([(value, value)])
    if name == "ANY":
        return _others(_LINE_ENDS)
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
    return _others(found) if negated else _joined(found)


# Formats: parts of what the standards allow, but the parts that are written


def _format_texts() -> dict[str, str]:
    day = "0[1-9]|1[0-9]|2[0-8]"
    days = [
        f"(?:0[13578]|1[02])-(?:{day}|29|3[01])",
        f"(?:0[469]|11)-(?:{day}|29|30)",
        f"02-(?:{day})",
    ]
    # Years 1000 to 9999: divisible by 4, by 100 only if by 400.
    leap = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
    date = f"(?:[1-9][0-9]{{3}}-{either(days)}|{leap}-02-29)"
    clock = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    time = rf"{clock}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{clock})"
    count = "(?:0|[1-9][0-9]{0,4})"
    # Units only go down, and leave none out.
    day, second = f"{count}D", f"{count}S"
    month_on = f"{count}M{optional(day)}"
    days = f"(?:{count}Y{optional(month_on)}|{month_on}|{day})"
    minute_on = f"{count}M{optional(second)}"
    times = f"T(?:{count}H{optional(minute_on)}|{minute_on}|{second})"
    label = "[A-Za-z][A-Za-z0-9]{0,19}(?:-[A-Za-z0-9]{1,20}){0,2}"
    host = rf"{label}(?:\.{label}){{0,2}}"
    local = "[A-Za-z0-9_+-]{1,20}"
    octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    group = "[0-9a-fA-F]{1,4}"
    shortened = [f"(?:{group}:){{{size}}}(?::{group}){{1,{7 - size}}}" for size in range(1, 7)]
    ipv6 = either([f"(?:{group}:){{7}}{group}", *shortened, f"::(?:{group}:){{0,5}}{group}"])
    path = "[A-Za-z0-9._~-]*"
    digits = "[0-9a-fA-F]"
    return {
        "date": date,
        "time": time,
        "date-time": f"{date}T{time}",
        "duration": f"P(?:{days}{optional(times)}|{times}|{count}W)",
        "email": rf"{local}(?:\.{local}){{0,2}}@{label}(?:\.{label}){{1,2}}",
        "hostname": host,
        "ipv4": rf"{octet}(?:\.{octet}){{3}}",
        "ipv6": ipv6,
        "uuid": f"{digits}{{8}}(?:-{digits}{{4}}){{3}}-{digits}{{12}}",
        "uri": rf"(?:https?|ftp)://{host}(?::[1-9][0-9]{{0,3}})?(?:/{path})*"
        rf"(?:\?[A-Za-z0-9=&._~-]*)?(?:#{path})?",
    }


FORMATS = _format_texts()
"""The expressions of strings, without quotation marks, of each `format` that is supported."""


@functools.cache
def any_text(depth: int) -> str:
    """Return the expression of any value with at most `depth` arrays and objects in each other."""
    texts = [STRING, NUMBER, BOOLEAN, NULL]
    if depth:
        inner = any_text(depth - 1)
        member = f"{KEY}: {inner}"
        texts.append(rf"\[{optional(inner + repeat(f', {inner}', 0, None))}\]")
        texts.append(rf"\{{{optional(member + repeat(f', {member}', 0, None))}\}}")
    return either(texts)
