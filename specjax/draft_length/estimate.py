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
_FARTHEST = 0.5
"""A step counts as at most so much faster or slower than expected: clocks jump, machines pause."""
_LEAST = 1e-9


class CostEstimate:
    """Seconds of the parts of a round: passes by width in ascending order, then other parts.

    `seconds` are those known now, `first` those at the beginning.
    """

    def __init__(self, seconds: Sequence[float] | np.ndarray, num_widths: int) -> None:
        self.num_widths = num_widths
        self.first = self.seconds = self._possible(np.array(seconds, float))
        self._covariance = self._drift(_START, _START, _START_FLOOR)

    def update(self, count: Sequence[float] | np.ndarray, seconds: float) -> None:
        """Learn from a step in which each part ran `count` times and all took `seconds`."""
        count = np.asarray(count, float)
        expected = float(count @ self.seconds)
        if expected <= 0 or not math.isfinite(seconds) or seconds <= 0:
            return
        seconds = min(max(seconds, (1 - _FARTHEST) * expected), (1 + _FARTHEST) * expected)
        covariance = self._covariance + self._drift(_COMMON_DRIFT, _OWN_DRIFT, _DRIFT_FLOOR)
        spread = covariance @ count
        gain = spread / (count @ spread + (_NOISE * expected) ** 2)
        self._covariance = covariance - np.outer(gain, spread)
        self.seconds = self._possible(self.seconds + gain * (seconds - expected))

    def _drift(self, common: float, own: float, floor: float) -> Float[np.ndarray, "parts parts"]:
        each = self.seconds
        alone = np.maximum(own * each, floor * each[0])
        return common**2 * np.outer(each, each) + np.diag(alone**2)

    def _possible(self, seconds: Float[np.ndarray, "parts"]) -> Float[np.ndarray, "parts"]:
        """Nothing takes no time, and no pass less than a narrower one."""
        seconds = np.maximum(seconds, _LEAST)
        seconds[: self.num_widths] = np.maximum.accumulate(seconds[: self.num_widths])
        return seconds
