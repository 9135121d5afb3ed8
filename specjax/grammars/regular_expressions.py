"""Regular expressions as automata over bytes.

The syntax is that of Python's `re`, whose parser is used; a whole text has to match. Packages that
index a vocabulary by a regular expression were tried and take another language: outlines-core
0.2.14 reads alternatives from left to right, so that `a|ab` excludes "ab", and drops characters
that are made of several single-byte tokens.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.grammars.byte_automaton import DEAD, ByteAutomaton
from specjax.grammars.characters import (
    DIGITS,
    EVERY,
    SPACES,
    WORD,
    Ranges,
    both,
    in_any_case,
    joined,
    others,
)

MOST_PARTS = 200_000
"""The most states of the automaton that is not deterministic, which grow with the expression."""
MOST_STATES = 12_000
"""The most states of the deterministic automaton, before it is made minimal."""
MOST_WORK = 1_500_000
"""The most states of the first automaton that those of the second one stand for, with repetition: a
second or two of work."""

_CATEGORIES = {
    ops.CATEGORY_DIGIT: DIGITS,
    ops.CATEGORY_WORD: WORD,
    ops.CATEGORY_SPACE: SPACES,
    ops.CATEGORY_NOT_DIGIT: others(DIGITS),
    ops.CATEGORY_NOT_WORD: others(WORD),
    ops.CATEGORY_NOT_SPACE: others(SPACES),
}
"""The characters of classes such as \\d."""
_NO_LANGUAGE = {
    ops.ASSERT: "look-around",
    ops.ASSERT_NOT: "look-around",
    ops.GROUPREF: "a reference to a group",
    ops.GROUPREF_EXISTS: "a reference to a group",
    ops.AT: "an anchor or a word boundary inside",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive quantifier",
}
"""What no automaton, or not the usual one, decides."""


def byte_automaton(pattern: str, what: str = "") -> ByteAutomaton:
    r"""Return the minimal automaton of the texts that match `pattern` as a whole.

    `\d`, `\w` and `\s` are those of `re.ASCII`, as in JSON Schema. `^` at the beginning and `$` at
    the end change nothing. Raises InputError, whose message begins with `what`, for an expression
    that does not parse, that needs more than a finite automaton, that no text matches, or with too
    many states.
    """
    what = what or f"regex={shown(pattern, 80)}"
    parsed = parsed_expression(pattern, what)
    parts = _Parts(what)
    try:
        begin, end = parts.sequence(_unanchored(parsed), parsed.state.flags)
    except RecursionError:
        raise InputError(f"{what}: too deeply nested; simplify it") from None
    automaton = _deterministic(parts, begin, end).minimal()
    if not automaton.accepting.any():
        raise InputError(f"{what}: no text matches it; allow some")
    return automaton


def parsed_expression(pattern: str, what: str) -> Any:
    """Return the parser's tree of an expression; raise InputError if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser's about syntax that may change
            return parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{what}: not a regular expression ({error}); mend it") from None


def _unanchored(parsed: Any) -> list[tuple[Any, Any]]:
    """Return the items of an expression without anchors at its beginning and end."""
    items = list(parsed)
    begins, ends = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING), (ops.AT_END, ops.AT_END_STRING)
    while items and items[0][0] is ops.AT and items[0][1] in begins:
        items = items[1:]
    while items and items[-1][0] is ops.AT and items[-1][1] in ends:
        items = items[:-1]
    return items


class _Parts:
    """A nondeterministic automaton that is built from the parts of an expression.

    `arrows[s]` are (first byte, last byte, successor), and `free[s]` are successors without a byte.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.arrows: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []

    def state(self) -> int:
        """Return a new state. Raises InputError if there are too many."""
        if len(self.arrows) >= MOST_PARTS:
            raise InputError(
                f"{self.what}: more than {MOST_PARTS} parts with its repetitions written out; "
                "repeat less"
            )
        self.arrows.append([])
        self.free.append([])
        return len(self.arrows) - 1

    def sequence(self, items: Sequence[tuple[Any, Any]], flags: int) -> tuple[int, int]:
        """Return the first and the last state of parts that follow one another."""
        begin = end = self.state()
        for op, argument in items:
            first, last = self.part(op, argument, flags)
            self.free[end].append(first)
            end = last
        return begin, end

    def part(self, op: Any, argument: Any, flags: int) -> tuple[int, int]:
        """Return the first and the last state of one part of a parsed expression."""
        if op in _NO_LANGUAGE:
            raise InputError(
                f"{self.what}: it has {_NO_LANGUAGE[op]}, which is not supported; leave it out"
            )
        if op is ops.BRANCH:
            return self.either([self.sequence(list(one), flags) for one in argument[1]])
        if op is ops.SUBPATTERN:
            _, added, removed, inner = argument
            return self.sequence(list(inner), (flags | added) & ~removed)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = argument
            return self.repeated(
                lambda: self.sequence(list(inner), flags),
                least,
                None if most is ops.MAXREPEAT else int(most),
            )
        return self.character(_characters(op, argument, flags))

    def either(self, parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the first and the last state of alternatives."""
        begin, end = self.state(), self.state()
        for first, last in parts:
            self.free[begin].append(first)
            self.free[last].append(end)
        return begin, end

    def repeated(
        self, part: Callable[[], tuple[int, int]], least: int, most: int | None
    ) -> tuple[int, int]:
        """Return the first and the last state of repetitions; `part` makes one, None is no end."""
        begin = end = self.state()
        for _ in range(least):
            first, last = part()
            self.free[end].append(first)
            end = last
        if most is None:
            first, last = part()
            self.free[end].append(first)
            self.free[last].append(end)
            return begin, end
        final = self.state()
        self.free[end].append(final)
        for _ in range(most - least):
            first, last = part()
            self.free[end].append(first)
            self.free[last].append(final)
            end = last
        return begin, final

    def character(self, ranges: Ranges) -> tuple[int, int]:
        """Return the first and the last state of one character of `ranges`."""
        begin, end = self.state(), self.state()
        shared: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for first, last in ranges:
            for sequence in _utf8(first, last):
                # Sequences with the same last bytes share the states before these.
                for at in range(len(sequence) - 1, 0, -1):
                    if sequence[at:] not in shared:
                        shared[sequence[at:]] = here = self.state()
                        self.arrows[here].append((*sequence[at], shared[sequence[at + 1 :]]))
                self.arrows[begin].append((*sequence[0], shared[sequence[1:]]))
        return begin, end


def _characters(op: Any, argument: Any, flags: int) -> Ranges:
    """Return the characters that a part of an expression for one character matches."""
    found, negated = [], op is ops.NOT_LITERAL
    if op is ops.ANY:
        return EVERY if flags & re.DOTALL else both(others([(10, 10)]), EVERY)
    if op in (ops.LITERAL, ops.NOT_LITERAL):
        found = [(argument, argument)]
    else:
        assert op is ops.IN, op
        for kind, value in argument:
            if kind is ops.NEGATE:
                negated = True
            elif kind is ops.LITERAL:
                found.append((value, value))
            elif kind is ops.RANGE:
                found.append(value)
            else:
                found += _CATEGORIES[value]
    if flags & re.IGNORECASE:
        found = in_any_case(found, ascii_only=bool(flags & re.ASCII))
    return both(others(found) if negated else joined(found), EVERY)


def _utf8(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield ranges of bytes, one per byte, that together write the characters of a range."""
    for bits in (7, 11, 16, 21):
        limit = (1 << bits) - 1
        if first <= limit < last:
            yield from _utf8(first, limit)
            first = limit + 1
    low, high = chr(first).encode(), chr(last).encode()
    for at in range(1, len(low)):
        # Split where the bytes before `at` differ, unless the others run through all values.
        tail = (1 << 6 * (len(low) - at)) - 1
        if first & ~tail != last & ~tail:
            if first & tail:
                yield from _utf8(first, first | tail)
                yield from _utf8((first | tail) + 1, last)
                return
            if last & tail != tail:
                yield from _utf8(first, (last & ~tail) - 1)
                yield from _utf8(last & ~tail, last)
                return
    yield tuple(zip(low, high, strict=True))


def _deterministic(parts: _Parts, begin: int, end: int) -> ByteAutomaton:
    """Return the automaton whose states are the sets of states that a text can lead to."""
    closures: dict[int, frozenset[int]] = {}
    work = 0

    def done(amount: int) -> None:
        nonlocal work
        work += amount
        if work > MOST_WORK:
            raise InputError(
                f"{parts.what}: its automaton takes too much work to make; simplify it, or bound "
                "what repeats"
            )

    def closure(state: int) -> frozenset[int]:
        """Return the states with arrows, and the last one, that `state` reaches without a byte."""
        if state not in closures:
            seen, waiting = {state}, [state]
            while waiting:
                for after in parts.free[waiting.pop()]:
                    if after not in seen:
                        seen.add(after)
                        waiting.append(after)
            done(len(seen))
            closures[state] = frozenset(one for one in seen if parts.arrows[one] or one == end)
        return closures[state]

    numbers = {closure(begin): 0}
    of_reached: dict[frozenset[int], int] = {}
    rows: list[np.ndarray] = []
    for states in (waiting := [closure(begin)]):
        done(len(states))
        by_bytes: dict[tuple[int, int], list[int]] = {}
        for state in states:
            for first, last, after in parts.arrows[state]:
                by_bytes.setdefault((first, last), []).append(after)
        edges = sorted({edge for first, last in by_bytes for edge in (first, last + 1)})
        row = np.full(256, DEAD, np.int32)
        for low, high in itertools.pairwise(edges):
            groups = [all_of for (first, last), all_of in by_bytes.items() if first <= low <= last]
            if not groups:
                continue
            done(sum(map(len, groups)))
            reached = frozenset(itertools.chain(*groups))
            if reached not in of_reached:
                union = frozenset().union(*map(closure, reached))
                done(len(union))
                if union not in numbers:
                    if len(numbers) >= MOST_STATES:
                        raise InputError(
                            f"{parts.what}: its automaton has more than {MOST_STATES} states; "
                            "simplify it, or bound what repeats"
                        )
                    numbers[union] = len(numbers)
                    waiting.append(union)
                of_reached[reached] = numbers[union]
            row[low:high] = of_reached[reached]
        rows.append(row)
    accepting = np.array([end in states for states in waiting])
    return ByteAutomaton(np.stack(rows), accepting)
