"""What the parts of a round cost at first, from timed rounds of the decoding itself.

While nothing is known, the rounds of a batch are of given kinds in turn: without drafts at each
compiled width, then with drafts of each drafter. Where earlier figures are known, those of drafting
are measured again, since a drafter that is believed too dear hardly runs. Such rounds commit tokens
like all others, and which kind is next does not depend on any token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.draft_length.policy import Work
from specjax.errors import InputError

_REPEATS, _REPEATS_AGAIN = 3, 2
"""How often each kind of round is timed, where nothing or something is known; the least counts.

Other work on the machine only adds to a round. What is believed too dear is hardly drafted, and
so hardly corrected; what is believed too cheap is corrected by the rounds that it causes.
"""
_NEVER_RUN = 0.25
"""What a token of a drafter that could not run is taken to cost, as a share of a plain pass."""
_KEPT_SPREAD = 0.2
"""How far a pass's earlier figure may be off, as a share of it."""


class RoundKind(NamedTuple):
    """A round with drafts of `lengths` tokens by drafter, no narrower than width `narrowest`."""

    narrowest: int
    lengths: tuple[int, ...]


class Figures(NamedTuple):
    """Seconds of passes by width; by drafter of its first token, of a further one, of catching up.

    `spread` is how far apart the timings of each were: the median less the least. Those that are
    not `complete` are in part a guess.
    """

    seconds: Float[np.ndarray, "parts"]
    spread: Float[np.ndarray, "parts"]
    complete: bool


class _Timed(NamedTuple):
    """A round: seconds, width (its index), and counts of all drafters as in `Work`."""

    seconds: float
    width: int
    first: int
    further: int
    catch_up: int

    @property
    def right(self) -> bool:
        """Whether it took some time: a clock may jump."""
        return 0 < self.seconds < math.inf


class Measurement:
    """The kinds of rounds that are timed, all in turn and several times over, and what they took.

    In turn, so that other work on the machine falls on all alike. `longest` are the drafters'
    longest drafts, in tokens. `known` are earlier figures, or None: of the passes only those of
    width 1 are timed then, which say how fast the machine is now.
    """

    def __init__(
        self,
        num_widths: int,
        longest: Sequence[int],
        known: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        self.num_widths, self._longest = num_widths, tuple(longest)
        self.known = None if known is None else np.asarray(known, float)
        nothing = (0,) * len(longest)
        self._timed_widths = num_widths if known is None else 1
        kinds = [RoundKind(width, nothing) for width in range(self._timed_widths)]
        for number, length in enumerate(longest):
            # The first one also reads what the drafter missed while others were timed.
            for count in (length, length, min(1, length)):
                kinds.append(RoundKind(0, (*nothing[:number], count, *nothing[number + 1 :])))
        self._num_kinds = len(kinds)
        self._kinds = kinds * (_REPEATS if known is None else _REPEATS_AGAIN)
        self._timed: list[_Timed] = []

    @property
    def next(self) -> RoundKind | None:
        """The kind of the next round; None when all are timed."""
        done = len(self._timed)
        return self._kinds[done] if done < len(self._kinds) else None

    @property
    def enough(self) -> bool:
        """Whether each kind was timed once, of a measurement that began with known figures."""
        return self.known is not None and len(self._timed) >= self._num_kinds

    def add(self, seconds: float, work: Work) -> None:
        """What a round of the kind that was next took, and what ran in it."""
        first, further = int(np.sum(work.first)), int(np.sum(work.further))
        width, catch_up = int(np.argmax(work.passes)), int(np.sum(work.catch_up))
        self._timed.append(_Timed(float(seconds), width, first, further, catch_up))

    def figures(self) -> Figures:
        """What each part takes.

        What was never drafted takes no time: a lookup that finds nothing is all in the first. Of a
        drafter that did not run at all, since no row had room for a draft, all is a guess. What was
        not caught up, since little was missed, is taken to cost as much as a first token. Of a
        drafter's earlier figures, at the machine's speed now, and the new ones the lower count.
        Raises InputError where the clock did not move in any round of a kind.
        """
        size, timed_widths = self._num_kinds, self._timed_widths
        each = [_right(self._timed[number::size]) for number in range(size)]
        passes = [_figure(one.seconds for one in timed) for timed in each[:timed_widths]]
        known = None
        if self.known is not None:
            known = self.known * (passes[0][0] / self.known[0])
            known[0] = passes[0][0]  # not a rounding off, which would seem to be its spread
            passes += [self._wider_pass(width, known) for width in range(1, self.num_widths)]

        def alone(one: _Timed) -> float:
            return one.seconds - passes[one.width][0]

        first, further, catch_up, complete = [], [], [], True
        guess = _NEVER_RUN * passes[0][0]
        for most, missed, longest, shortest in zip(
            self._longest, *(each[timed_widths + kind :: 3] for kind in range(3)), strict=True
        ):
            ran = any(one.first for one in (*missed, *longest, *shortest))
            if self.known is None and most and not ran:
                complete = False
                for parts in (first, further, catch_up):
                    parts.append((guess, guess))
                continue
            # At its end a row has no room for a draft.
            first.append(_figure(alone(one) / one.first for one in shortest if one.first))
            begun = 0.0 if math.isnan(first[-1][0]) else first[-1][0]
            more = [one for one in longest if one.further > 0]
            further.append(_figure((alone(one) - begun * one.first) / one.further for one in more))
            each_more = 0.0 if math.isnan(further[-1][0]) else further[-1][0]
            late = [one for one in missed if one.catch_up]
            reading = [alone(one) - begun * one.first - each_more * one.further for one in late]
            found = _figure(took / one.catch_up for took, one in zip(reading, late, strict=True))
            unknown = self.known is None and not late
            catch_up.append((begun, begun) if unknown else found)
        timed, spread = np.transpose([*passes, *first, *further, *catch_up])
        seconds = timed
        if known is not None:
            seconds = np.fmin(timed, known)
            spread = np.where(seconds < timed, timed - seconds, spread)
        return Figures(np.maximum(np.nan_to_num(seconds), 0.0), np.nan_to_num(spread), complete)

    def _wider_pass(self, width: int, known: Float[np.ndarray, "parts"]) -> tuple[float, float]:
        """A kept figure of a pass, and how far it may be off.

        No pass takes more than the rounds that had it, or a wider one.
        """
        timed = [one.seconds for one in self._timed if one.right and one.width >= width]
        return min([float(known[width]), *timed]), _KEPT_SPREAD * float(known[width])


def _right(timed: Sequence[_Timed]) -> list[_Timed]:
    """The rounds whose seconds are right. Raises InputError where there is none."""
    right = [one for one in timed if one.right]
    if timed and not right:
        raise InputError(
            f'num_speculative_tokens="auto": this machine\'s clock says that a round takes '
            f"{timed[0].seconds:g} seconds, so that costs cannot be measured; use a whole number"
        )
    return right


def _figure(timings: Iterable[float]) -> tuple[float, float]:
    """The least of some timings, and how far below their median it is; NaN if there are none."""
    timings = list(timings)
    if not timings:
        return math.nan, math.nan
    return min(timings), statistics.median(timings) - min(timings)
