"""What the parts of a round cost at first, from timed rounds of the decoding itself.

While nothing is known, the rounds of a batch are of given kinds in turn: without drafts at each
compiled width, then with drafts of each drafter. They commit tokens like all others, and which kind
is next does not depend on any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.draft_length.policy import Work

_TURNS = 3
"""How often each kind of round is timed; the median counts."""


class Kind(NamedTuple):
    """A round with drafts of `lengths` tokens by drafter, no narrower than width `narrowest`."""

    narrowest: int
    lengths: tuple[int, ...]


class _Timed(NamedTuple):
    """A round's seconds, the width that it had (its index), and tokens drafted after the first."""

    seconds: float
    width: int
    further: int


class Measurement:
    """The kinds of rounds that are timed, all in turn and several times over, and what they took.

    In turn, so that other work on the machine falls on all alike. `longest` are the drafters'
    longest drafts, in tokens.
    """

    def __init__(self, num_widths: int, longest: Sequence[int]) -> None:
        self.num_widths = num_widths
        nothing = (0,) * len(longest)
        kinds = [Kind(width, nothing) for width in range(num_widths)]
        for number, length in enumerate(longest):
            # The first one also reads what the drafter missed while others were timed.
            for count in (length, length, min(1, length)):
                kinds.append(Kind(0, (*nothing[:number], count, *nothing[number + 1 :])))
        self._kinds = kinds * _TURNS
        self._timed: list[_Timed] = []

    @property
    def next(self) -> Kind | None:
        """The kind of the next round; None when all are timed."""
        done = len(self._timed)
        return self._kinds[done] if done < len(self._kinds) else None

    def add(self, seconds: float, work: Work) -> None:
        """What a round of the kind that was next took, and what ran in it."""
        width, further = int(np.argmax(work.passes)), int(np.sum(work.further))
        self._timed.append(_Timed(seconds, width, further))

    def figures(self) -> Float[np.ndarray, "parts"]:
        """Seconds of passes by width, of each drafter's first token, and of each further one.

        What was never drafted takes no time: a lookup that finds nothing is all in the first.
        """
        size = len(self._kinds) // _TURNS
        turns = [self._timed[turn * size :][:size] for turn in range(_TURNS)]
        return np.maximum(np.median([self._of_turn(turn) for turn in turns], axis=0), 0.0)

    def _of_turn(self, timed: Sequence[_Timed]) -> list[float]:
        passes = [one.seconds for one in timed[: self.num_widths]]
        drafts = timed[self.num_widths :]
        first, further = [], []
        for longest, one in zip(drafts[1::3], drafts[2::3], strict=True):
            alone = [round_.seconds - passes[round_.width] for round_ in (longest, one)]
            more = longest.further - one.further
            first.append(alone[1])
            further.append((alone[0] - alone[1]) / more if more else 0.0)
        return [*passes, *first, *further]
