"""Sets of characters as intervals of code points, and the characters that equal one another."""

from __future__ import annotations

import _sre
import functools
from collections.abc import Iterator
from itertools import pairwise
from re import _casefix  # type: ignore[attr-defined]

Ranges = list[tuple[int, int]]
"""A set of characters: the first and last code points of intervals."""
EVERY: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
"""All characters that UTF-8 can write: surrogates are none."""
DIGITS: Ranges = [(0x30, 0x39)]
WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
SPACES: Ranges = [(9, 13), (0x20, 0x20)]
"""The digits, the characters of words, and the spaces of ASCII."""


def joined(ranges: Ranges) -> Ranges:
    """Return the set of the characters of intervals that may overlap."""
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def others(ranges: Ranges) -> Ranges:
    """Return the characters, and surrogates, that are not in a set."""
    edges = [(-1, -1), *joined(ranges), (0x110000, 0x110000)]
    return [(a + 1, b - 1) for (_, a), (b, _) in pairwise(edges) if a + 1 < b]


def both(some: Ranges, more: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    found = [(max(a, c), min(b, d)) for a, b in some for c, d in more]
    return sorted((first, last) for first, last in found if first <= last)


def in_any_case(ranges: Ranges, *, ascii_only: bool) -> Ranges:
    """Return a set with the characters that equal one of its own if case is ignored.

    They are those of Python's `re`; `ascii_only` says that only letters of ASCII have cases.
    """
    found = list(ranges)
    for first, last in ranges:
        for point in _cased(first, last):
            equal = _cases()[point]
            found += [(one, one) for one in equal if not ascii_only or point < 128 > one]
    return found


@functools.cache
def _cases() -> dict[int, tuple[int, ...]]:
    """Return the characters that equal each character with several cases."""
    lower: dict[int, list[int]] = {}
    for point in range(0x20000):
        lower.setdefault(_sre.unicode_tolower(point), []).append(point)
    cases = {}
    for point, equal in lower.items():
        further = _casefix._EXTRA_CASES.get(point, ())
        every = {*equal, *(one for extra in further for one in lower[extra])}
        if len(every) > 1:
            cases |= {one: tuple(sorted(every - {one})) for one in equal}
    return cases


def _cased(first: int, last: int) -> Iterator[int]:
    """Yield the characters of an interval that equal others if case is ignored."""
    if last - first < 256:
        yield from (point for point in range(first, last + 1) if point in _cases())
    else:
        yield from (point for point in _cases() if first <= point <= last)
