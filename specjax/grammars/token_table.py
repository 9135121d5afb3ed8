"""Tables of which tokens may follow, for a vocabulary and an automaton over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from specjax.errors import InputError
from specjax.grammars.byte_automaton import DEAD, ByteAutomaton

MOST_STATES, MOST_ENTRIES = 8192, 1 << 22
"""The most states of a table, and the most entries (2 bytes each, in every row that uses it)."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token of a vocabulary, in texts.

    `first[t]` are those of token t at the beginning of a text, and `later[t]` those after others.
    Tokens without a text of their own have None. `special` tokens have a text that outputs leave
    out.
    """

    first: tuple[bytes | None, ...]
    later: tuple[bytes | None, ...]
    special: frozenset[int] = frozenset()

    def without(self, tokens: frozenset[int]) -> Vocabulary:
        """Return the vocabulary without some of its tokens."""
        if not tokens:
            return self
        first, later = (
            tuple(None if token in tokens else text for token, text in enumerate(texts))
            for texts in (self.first, self.later)
        )
        return Vocabulary(first, later, self.special)


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Which tokens may follow in each state of an output, and the state after each.

    Tokens that are alike in all states are one class: after token t in state s comes state
    `successors[s, classes[t]]`, or `DEAD` where t is not allowed. State 0 is the first.
    `least[s]` is the least number of tokens that complete an output, the token that ends it
    included if there is one, and `drafts[s]` a token that is likely there: the longest one of a
    text that has to follow, else -1.
    """

    classes: Int[np.ndarray, "V"]
    successors: Int[np.ndarray, "states classes"]
    least: Int[np.ndarray, "states"]
    drafts: Int[np.ndarray, "states"]

    def state_after(self, tokens: Sequence[int]) -> int:
        """Return the state after an output's tokens, `DEAD` if one of them is not allowed."""
        state = 0
        for token in tokens:
            if state != DEAD:
                state = int(self.successors[state, self.classes[token]])
        return state

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Return whether an output's tokens are a complete text of the grammar."""
        state = self.state_after(tokens)
        return state != DEAD and bool(self.least[state] == 0)


def token_table(
    automaton: ByteAutomaton,
    vocabulary: Vocabulary,
    ends: Sequence[int],
    name: str,
    *,
    before: int = 0,
) -> TokenTable:
    """Return the table of the tokens whose texts together are texts of the automaton's language.

    `ends` are the tokens that end an output; they are allowed where a text is complete. In the
    first `before` states special tokens are allowed, too, as their texts. Raises InputError, which
    calls the grammar `name`, if no tokens make a text, and for a table that is too large.
    """
    if len(automaton.accepting) > MOST_STATES:
        raise InputError(
            f"{name}: its automaton has {len(automaton.accepting)} states, more than "
            f"{MOST_STATES}; simplify it, or bound what repeats"
        )
    columns = _Columns(automaton, name)
    of_token = [columns.after(piece) for piece in vocabulary.later]
    for token in vocabulary.special:
        of_token[token] = columns.only(of_token[token], before)
    first = [
        DEAD
        if token in vocabulary.special and not before
        else columns.column(columns.after(piece))[0]
        for token, piece in enumerate(vocabulary.first)
    ]
    for token in ends:
        of_token[token], first[token] = columns.end, columns.column(columns.end)[0]
    pairs, classes = np.unique(np.stack((of_token, first)), axis=1, return_inverse=True)
    # The first state of an output, in which tokens may have other texts, comes before all others.
    later = np.stack([columns.column(number) for number in pairs[0].tolist()], axis=1)
    later = np.concatenate((later, np.full((1, later.shape[1]), DEAD, later.dtype)))
    successors = np.concatenate((pairs[1][None], later))
    successors = np.where(successors == DEAD, DEAD, successors + 1)
    complete = np.concatenate((automaton.accepting[:1], automaton.accepting, [True]))
    if ends:
        complete[:-1] = False
    drafts = [
        _forced_tokens(automaton, texts, vocabulary.special.union(ends), ends[:1], before)
        for texts in (vocabulary.first, vocabulary.later)
    ]
    drafts = np.concatenate((drafts[0][:1], drafts[1], [DEAD])).astype(np.int32)
    return _reduced(successors, complete, classes.reshape(-1), drafts, name)


class _Columns:
    """The states after a text in each state of an automaton, by number, each of them kept once.

    Number 0 is that of the empty text; the state after the last one is that of a complete output.
    """

    def __init__(self, automaton: ByteAutomaton, name: str) -> None:
        count = len(automaton.accepting)
        self._name = name
        self._columns: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}
        self._after: dict[tuple[int, int], int] = {}
        # One row more, so that what follows a dead state is dead.
        self._successors = np.concatenate((automaton.successors, np.full((1, 256), DEAD)))
        self._number(np.arange(count))
        self.dead = self._number(np.full(count, DEAD))
        self.end = self._number(np.where(automaton.accepting, count, DEAD))

    def _number(self, column: np.ndarray) -> int:
        column = column.astype(np.int16)
        key = column.tobytes()
        if key not in self._numbers:
            if len(self._columns) * len(column) > 4 * MOST_ENTRIES:
                raise InputError(
                    f"{self._name}: {len(column)} states after which more than "
                    f"{len(self._columns)} texts of tokens differ are too many; simplify it, or "
                    "bound what repeats"
                )
            self._numbers[key] = len(self._columns)
            self._columns.append(column)
        return self._numbers[key]

    def column(self, number: int) -> Int[np.ndarray, "states"]:
        """Return a column by its number."""
        return self._columns[number]

    def after(self, text: bytes | None) -> int:
        """Return the number of the column of a text; without a text, or if empty, all are dead."""
        if not text:
            return self.dead
        number = 0
        for byte in text:
            after = self._after.get((number, byte))
            if after is None:
                after = self._number(self._successors[self._columns[number], byte])
                self._after[number, byte] = after
            number = after
            if number == self.dead:
                break
        return number

    def only(self, number: int, states: int) -> int:
        """Return the number of a column that is dead from the state `states` on."""
        column = self._columns[number].copy()
        column[states:] = DEAD
        return self._number(column)


def _forced_tokens(
    automaton: ByteAutomaton,
    texts: Sequence[bytes | None],
    left_out: frozenset[int],
    end: Sequence[int],
    before: int,
) -> Int[np.ndarray, "states"]:
    """Return the longest token of the text that has to follow in each state, -1 without one.

    `texts` are those of tokens, of which some are `left_out`. Where nothing can follow a complete
    text, it is the `end` token, if there is one. States of a text `before` the grammar have none.
    """
    by_text = {
        text: token
        for token, text in reversed([*enumerate(texts)])
        if text and token not in left_out
    }
    longest = max(map(len, by_text), default=0)
    count = (automaton.successors != DEAD).sum(axis=1)
    only_byte = np.where(
        (count == 1) & ~automaton.accepting, (automaton.successors != DEAD).argmax(axis=1), DEAD
    )
    found = np.full(len(count), DEAD)
    for state in range(before, len(count)):
        if automaton.accepting[state] and not count[state] and end:
            found[state] = end[0]
        text, at = b"", state
        while only_byte[at] != DEAD and len(text) < longest:
            text += bytes([only_byte[at]])
            at = automaton.successors[at, only_byte[at]]
            found[state] = by_text.get(text, found[state])
    return found


def _reduced(
    successors: Int[np.ndarray, "states classes"],
    complete: np.ndarray,
    classes: Int[np.ndarray, "V"],
    drafts: Int[np.ndarray, "states"],
    name: str,
) -> TokenTable:
    """Return the table without states that no output reaches, or from which none is completed.

    An output is complete in the states `complete`.
    """
    count = len(successors)
    state, number = np.nonzero(successors != DEAD)
    after = successors[state, number]
    # From a new node to the complete states, and along the arrows backwards.
    source = np.concatenate((np.full(complete.sum(), count), after))
    target = np.concatenate((np.flatnonzero(complete), state))
    least = _distances(source, target, count + 1, count)[:-1] - 1
    leads_nowhere = (successors == DEAD) | (least[successors] < 0)
    successors = np.where(leads_nowhere, DEAD, successors)
    state, number = np.nonzero(successors != DEAD)
    reached = _distances(state, successors[state, number], count, 0) >= 0
    if least[0] < 0:
        raise InputError(
            f"{name}: no tokens of the vocabulary make such a text; allow others, or use another "
            "model"
        )
    kept = np.flatnonzero(reached)
    renumbered = np.full(count, DEAD)
    renumbered[kept] = np.arange(len(kept))
    rows = successors[kept]
    rows = np.where(rows == DEAD, DEAD, renumbered[rows])
    columns, merged = np.unique(rows, axis=1, return_inverse=True)
    if len(columns) > MOST_STATES or columns.size > MOST_ENTRIES:
        raise InputError(
            f"{name}: its table has {len(columns)} states and {columns.shape[1]} classes of tokens "
            f"({2 * columns.size / 2**20:.0f} MiB), more than {MOST_STATES} states or "
            f"{2 * MOST_ENTRIES >> 20} MiB; simplify it, or bound what repeats"
        )
    return TokenTable(
        merged.reshape(-1)[classes].astype(np.int32),
        columns.astype(np.int16),
        least[kept].astype(np.int32),
        _allowed_drafts(drafts[kept], columns, merged.reshape(-1)[classes]),
    )


def _allowed_drafts(
    drafts: Int[np.ndarray, "states"],
    successors: Int[np.ndarray, "states classes"],
    classes: Int[np.ndarray, "V"],
) -> Int[np.ndarray, "states"]:
    """Return the drafts that are allowed, and the only allowed token where there is one."""
    states = np.arange(len(drafts))
    allowed = successors[states, classes[np.maximum(drafts, 0)]] != DEAD
    sizes = np.bincount(classes, minlength=successors.shape[1])
    number = (sizes[None] * (successors != DEAD)).sum(axis=1)
    example = np.full(successors.shape[1], DEAD)
    example[classes[::-1]] = np.arange(len(classes))[::-1]
    only = example[(successors != DEAD).argmax(axis=1)]
    drafts = np.where((drafts != DEAD) & allowed, drafts, DEAD)
    return np.where(number == 1, only, drafts).astype(np.int32)


def _distances(
    source: np.ndarray, target: np.ndarray, count: int, start: int
) -> Int[np.ndarray, "states"]:
    """Return the least number of arrows from node `start` to each of `count`, -1 without a way."""
    arrows = csr_array((np.ones(len(source), bool), (source, target)), shape=(count, count))
    distance = dijkstra(arrows, indices=start, unweighted=True)
    return np.where(np.isfinite(distance), distance, -1).astype(np.int32)
