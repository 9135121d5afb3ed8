"""Deterministic automata over the bytes of UTF-8 texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

_MOST_WORK = 3_000_000
"""The most states that are looked at to find equal ones: a second or two."""
DEAD = -1
"""The successor of a state for bytes that no text of the language has there."""


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton; state 0 is the first.

    `successors[s, b]` is the state after byte b, or `DEAD`; a text that ends in an `accepting`
    state is in the language.
    """

    successors: Int[np.ndarray, "states 256"]
    accepting: Bool[np.ndarray, "states"]

    def accepts(self, text: bytes) -> bool:
        """Return whether a text is in the language."""
        state = 0
        for byte in text:
            state = self.successors[state, byte]
            if state == DEAD:
                return False
        return bool(self.accepting[state])

    def minimal(self) -> ByteAutomaton:
        """Return the smallest automaton of the same language, without states that lead nowhere.

        If that takes long it may have equal states. The first state is kept even if the language is
        empty.
        """
        distance = _distances_to_acceptance(self)
        successors = np.where(distance[self.successors] >= 0, self.successors, DEAD)
        successors[self.successors == DEAD] = DEAD
        columns = np.unique(successors, axis=1)
        # States of different distances differ; starting from these fewer refinements are left.
        groups = _numbered(distance)
        work = _MOST_WORK
        weights = np.random.default_rng(0).integers(1 << 62, size=columns.shape[1] + 1)
        for exact in (False, True):  # hashes find nearly all, and may find too few
            while True:
                after = np.where(columns == DEAD, DEAD, groups[columns])
                rows = np.column_stack((groups, after))
                refined = _numbered(rows if exact else rows @ weights)
                if refined.max() == groups.max():
                    break
                groups, work = refined, work - len(groups)
                if work < 0:
                    # States that repeat for long are as good as all different.
                    return _renumbered(successors, self.accepting, np.arange(len(successors)))
        return _renumbered(successors, self.accepting, groups)

    def after_marker(self, marker: bytes) -> tuple[ByteAutomaton, int]:
        """Return the automaton of any bytes up to the first `marker`, then a text of this language.

        The second value is the number of states before the marker is complete; they come first.
        """
        count = len(marker)
        before = np.zeros((count, 256), np.int32)
        fallback = 0
        for at, byte in enumerate(marker):  # the automaton of Knuth, Morris and Pratt
            before[at] = before[fallback]
            before[at, byte] = at + 1
            fallback = before[fallback, byte] if at else 0
        inside = np.where(self.successors == DEAD, DEAD, self.successors + count)
        return (
            ByteAutomaton(
                np.concatenate((before, inside.astype(np.int32))),
                np.concatenate((np.zeros(count, bool), self.accepting)),
            ),
            count,
        )


def _numbered(values: np.ndarray) -> Int[np.ndarray, "states"]:
    """Return numbers from 0 on that are equal where rows of `values` are."""
    return np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)


def _distances_to_acceptance(automaton: ByteAutomaton) -> Int[np.ndarray, "states"]:
    """Return the least number of bytes from each state to an accepting one, -1 if there is none."""
    distance = np.where(automaton.accepting, 0, -1)
    before = [set[int]() for _ in distance]
    for state, row in enumerate(automaton.successors):
        for after in np.unique(row[row != DEAD]):
            before[after].add(state)
    frontier = np.flatnonzero(automaton.accepting).tolist()
    while frontier:
        reached = {one for after in frontier for one in before[after] if distance[one] < 0}
        for one in reached:
            distance[one] = distance[frontier[0]] + 1
        frontier = list(reached)
    return distance


def _renumbered(
    successors: Int[np.ndarray, "states 256"],
    accepting: Bool[np.ndarray, "states"],
    groups: np.ndarray,
) -> ByteAutomaton:
    """Return the automaton of groups of states, those that the first one reaches, it being 0."""
    numbers, member = {groups[0]: 0}, [0]
    for state in member:
        for after in np.unique(successors[state][successors[state] != DEAD]):
            if groups[after] not in numbers:
                numbers[groups[after]] = len(member)
                member.append(after)
    number = np.full(groups.max() + 1, DEAD, np.int32)
    number[list(numbers)] = list(numbers.values())
    rows = successors[member]
    return ByteAutomaton(
        np.where(rows == DEAD, DEAD, number[groups[rows]]).astype(np.int32), accepting[member]
    )
