"""Regular expressions of JSON's numbers between bounds."""

from __future__ import annotations

import math
from fractions import Fraction

from specjax.grammars.expressions import either, literal, optional, repeat

Bound = tuple[Fraction, bool] | None
"""A bound of numbers and whether it is exclusive; None for no bound."""

DIGITS = 15
"""How many digits of a decimal a float keeps: different decimals are different floats."""
_WHOLE = f"[1-9][0-9]{{0,{DIGITS - 1}}}"
INTEGER = f"(?:0|-?{_WHOLE})"
NUMBER = rf"-?(?:0|{_WHOLE})(?:\.[0-9]{{1,{DIGITS}}})?(?:[eE][+-]?[0-9]{{1,2}})?"
_MAX_LISTED = 200  # multiples, each of them an alternative


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
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return ""
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
