"""Which program the next step of an engine with "auto" is of, and its most rounds."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDS_PER_LOOK = 16
"""The most rounds between two looks at the clock."""
SLEEPING_ROUNDS_OF_LOOKUPS = 4
"""The same while all drafters sleep, where some look tokens up: what they find soon passes by."""
_SHORT_STEP = 4
"""The rounds of a step after one in which less than half of the rounds had drafts."""


@dataclass
class NextStep:
    """The choice between a step of plain decoding's program and one of the drafting program.

    `plain` is the choice, and `most_plain_rounds` the most rounds of a plain step. `has_room` says
    whether a step may be plain: no drafter has to observe first.
    """

    most_plain_rounds: int = ROUNDS_PER_LOOK
    plain: bool = False
    has_room: bool = False
    _drafting_rounds: int = ROUNDS_PER_LOOK
    """The rounds of the next step if a drafter would draft in its first."""
    _plain_rounds: int = 1
    """The same if none would."""

    @property
    def rounds(self) -> int:
        """The most rounds of the next step."""
        return self._plain_rounds if self.plain else self._drafting_rounds

    def begin(self) -> None:
        """A single round of the drafting program: nothing is known of the rows."""
        self.plain, self._drafting_rounds, self.has_room = False, 1, False

    def rows_admitted(self) -> None:
        """Ask after a single plain round whether drafters would draft: new rows may well."""
        self._plain_rounds = 1

    def draft_long(self) -> None:
        """The next steps of the drafting program have as many rounds as one may."""
        self._drafting_rounds = ROUNDS_PER_LOOK

    def take(self, *, drafts: bool) -> None:
        """The program for rounds that are known to have drafts, or none."""
        self.plain = not drafts and self.has_room

    def choose(self, *, drafts: bool, few: bool) -> None:
        """Decide by the last step, and by whether a drafter `drafts` in the next round.

        A step of either program is twice as long as the last one where that did what it is there
        for. After one that drafted in `few` rounds, less than half, the next is short, and a single
        round if it is not to begin with a draft.
        """
        if self.plain:
            self._plain_rounds = min(2 * self._plain_rounds, self.most_plain_rounds)
            self._drafting_rounds = 1
        elif few:
            self._drafting_rounds = _SHORT_STEP if drafts else 1
        else:
            self._drafting_rounds = min(2 * self._drafting_rounds, ROUNDS_PER_LOOK)
            self._plain_rounds = 1
        self.take(drafts=drafts)
