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

_TURNS = 3
"""How often each kind of round is timed; the median counts."""


class Kind(NamedTuple):
    """A round with drafts of `lengths` tokens by drafter, no narrower than width `narrowest`."""

    narrowest: int
    lengths: tuple[int, ...]


class Measurement:
    """The kinds of rounds that are timed, all in turn and several times over, and their seconds.

    In turn, so that other work on the machine falls on all alike. `longest` are the drafters'
    longest drafts, in tokens.
    """

    def __init__(self, num_widths: int, longest: Sequence[int]) -> None:
        self.num_widths, self.longest = num_widths, tuple(longest)
        nothing = (0,) * len(self.longest)
        kinds = [Kind(width, nothing) for width in range(num_widths)]
        for number, length in enumerate(self.longest):
            # The first one also reads what the drafter missed while others were timed.
            for count in (length, length, min(1, length)):
                lengths = (*nothing[:number], count, *nothing[number + 1 :])
                kinds.append(Kind(num_widths - 1, lengths))
        self._kinds = kinds * _TURNS
        self._seconds: list[float] = []

    @property
    def next(self) -> Kind | None:
        """The kind of the next round; None when all are timed."""
        done = len(self._seconds)
        return self._kinds[done] if done < len(self._kinds) else None

    def add(self, seconds: float) -> None:
        """The seconds of a round of the kind that was next."""
        self._seconds.append(seconds)

    def figures(self) -> Float[np.ndarray, "parts"]:
        """Seconds of passes by width, of each drafter's first token, and of each further one."""
        turns = np.reshape(self._seconds, (_TURNS, -1))
        passes, drafts = turns[:, : self.num_widths], turns[:, self.num_widths :]
        longest, one = drafts[:, 1::3], drafts[:, 2::3]
        first = one - passes[:, -1:]
        further = (longest - one) / np.maximum(np.asarray(self.longest) - 1, 1)
        each = np.concatenate([passes, first, further], axis=1)
        return np.maximum(np.median(each, axis=0), 0.0)
