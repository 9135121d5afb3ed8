"""What the parts of a round cost, from how long some rounds took: a Kalman filter.

Each step of the decoding loop gives one equation: so many rounds at each width, so many drafts, and
the seconds of them all. What changes is a machine that grows slow, which changes all figures alike,
and a context that grows long, which changes some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_COMMON_DRIFT, _OWN_DRIFT = 0.03, 0.01
"""By how much of itself a figure may change in a step: together with all others, and alone."""
_NOISE = 0.1
"""Of a step's seconds."""
_START = 0.1
"""How far a figure that was measured may be off,"""
_START_FLOOR, _DRIFT_FLOOR = 0.05, 0.005
"""and at least, in passes of width 1: small figures are differences of large ones."""
_FARTHEST = 1.5
"""A step counts as at most so many times faster or slower than expected: machines pause."""
_FARTHEST_AGAIN = 4.0
"""The same where the step before was as far off, in the same direction:"""
_JUMP = 0.3
"""any figure may then have changed by so much of itself."""
_LEAST = 1e-9


class CostFilter:
    """Seconds of the parts of a round: passes by width in ascending order, then other parts.

    `seconds` are those known now, `first` those at the beginning. `spread` is how far apart, in
    seconds, the timings of each were that they come from: the first steps correct those figures
    most whose timings disagree.
    """

    def __init__(
        self,
        seconds: Sequence[float] | np.ndarray,
        num_widths: int,
        spread: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        self.num_widths = num_widths
        self.first = self.seconds = self._possible(np.array(seconds, float))
        self._covariance = self._drift(_START, _START, _START_FLOOR)
        if spread is not None:
            self._covariance += np.diag(np.square(np.asarray(spread, float)))
        self._far = 0

    def update(self, count: Sequence[float] | np.ndarray, seconds: float) -> None:
        """Learn from a step in which each part ran `count` times and all took `seconds`."""
        count = np.asarray(count, float)
        expected = float(count @ self.seconds)
        if expected <= 0 or not math.isfinite(seconds) or seconds <= 0:
            return
        covariance = self._covariance + self._drift(_COMMON_DRIFT, _OWN_DRIFT, _DRIFT_FLOOR)
        far = int(seconds > _FARTHEST * expected) - int(seconds < expected / _FARTHEST)
        again, self._far = far != 0 and far == self._far, far
        if again:
            covariance += self._drift(_JUMP, _JUMP, 0.0)
        most = _FARTHEST_AGAIN if again else _FARTHEST
        seconds = min(max(seconds, expected / most), most * expected)
        spread = covariance @ count
        gain = spread / (count @ spread + (_NOISE * expected) ** 2)
        self._covariance = covariance - np.outer(gain, spread)
        self.seconds = self._possible(self.seconds + gain * (seconds - expected))

    def plain_doubt(self, count: Sequence[float] | np.ndarray) -> float:
        """How far a pass of width 1 may be off beside work in which each part ran `count` times.

        The standard deviation of the ratio of the two, as a share of it.
        """
        count = np.asarray(count, float)
        share = -count / (count @ self.seconds)
        share[0] += 1 / self.seconds[0]
        return math.sqrt(max(share @ self._covariance @ share, 0.0))

    def _drift(self, common: float, own: float, floor: float) -> Float[np.ndarray, "parts parts"]:
        each = self.seconds
        alone = np.maximum(own * each, floor * each[0])
        return common**2 * np.outer(each, each) + np.diag(alone**2)

    def _possible(self, seconds: Float[np.ndarray, "parts"]) -> Float[np.ndarray, "parts"]:
        """Nothing takes no time, and no pass less than a narrower one."""
        seconds = np.maximum(seconds, _LEAST)
        seconds[: self.num_widths] = np.maximum.accumulate(seconds[: self.num_widths])
        return seconds
