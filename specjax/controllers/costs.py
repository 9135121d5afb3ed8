"""What steps cost: seconds explained by counts, by recursive least squares with forgetting.

A step's seconds are a sum over what it did: a constant (its dispatch), its passes by compiled
width, and each drafter's first and further passes. The unknowns are estimated from ordinary steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from specjax.controllers.base import StepRecord, StepSizes

# Before the first step, in plain passes: a mean and a standard deviation each.
_CONSTANT = (0.05, 1.0)
_PASS = (1.0, 1.0)
_SLOT = (0.1, 0.1)
"""Each further slot of a pass."""
_FIRST = (0.15, 0.5)
_FURTHER = (0.1, 0.2)

_NOISE = 0.07
"""Of a step's seconds, relative."""
_COMMON_DRIFT, _OWN_DRIFT = 0.03, 0.015
"""How much all costs together, and each by itself, may change from one step to the next."""
_OUTLIER = 3.0
"""Deviations, in standard deviations, beyond which a step counts as no further off."""
_LEAST, _MOST = 1e-7, 1e6
"""Seconds of a step that are believed."""


class Costs(NamedTuple):
    """Estimates of the unknowns, in the order of `count_work`, and their covariance.

    A compiled width's unknown is what its pass costs beyond the next narrower one: so widths that
    never ran follow those that did. `known` is False before the first step, when all are in plain
    passes. `surprise` is the sign of the last step's deviation if it was an outlier, else 0.
    """

    seconds: Float[np.ndarray, "unknowns"]
    covariance: Float[np.ndarray, "unknowns unknowns"]
    known: bool = False
    surprise: int = 0

    @property
    def constant(self) -> float:
        """Seconds of a step beside its rounds."""
        return float(self.seconds[0])


def initial_costs(sizes: StepSizes) -> Costs:
    """What is taken to be so before the first step, in plain passes."""
    gaps = np.diff(sizes.widths).astype(float)
    count = len(sizes.drafters)
    columns = [
        np.concatenate([[constant, one], slot * gaps, [first] * count, [further] * count])
        for constant, one, slot, first, further in zip(
            _CONSTANT, _PASS, _SLOT, _FIRST, _FURTHER, strict=True
        )
    ]
    return Costs(columns[0], np.diag(columns[1] ** 2))


def count_work(
    steps: Float[np.ndarray, "*A"],
    passes: Shaped[np.ndarray, "*A widths"],
    ran: Shaped[np.ndarray, "*A drafters"],
    further: Shaped[np.ndarray, "*A drafters"],
) -> Float[np.ndarray, "*A unknowns"]:
    """How often each unknown occurs: the constant, passes at least so wide, drafters' passes."""
    at_least = np.cumsum(passes[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([np.asarray(steps)[..., None], at_least, ran, further], axis=-1)


def learn_costs(costs: Costs, sizes: StepSizes, record: StepRecord) -> Costs:
    """The costs after a step; as they were where its seconds say nothing."""
    seconds = record.seconds
    if seconds is None or not _LEAST < seconds < _MOST or not record.rounds:
        return costs
    stops = np.array([drafter.stops for drafter in sizes.drafters], float)
    work = count_work(np.ones(()), record.passes, record.ran, record.further * stops)
    values, covariance = costs.seconds, costs.covariance
    if not costs.known:
        unit = seconds / (work @ values)
        values, covariance = values * unit, covariance * unit**2
    drift = _COMMON_DRIFT**2 * np.outer(values, values) + np.diag((_OWN_DRIFT * values) ** 2)
    expected = work @ values
    surprise = _outlier(work, covariance + drift, seconds - expected, expected)
    if surprise and surprise == costs.surprise:
        # Twice in the same direction: the machine's speed has changed, and with it all costs.
        drift += ((seconds - expected) / expected) ** 2 * np.outer(values, values)
    covariance = covariance + drift
    variance = work @ covariance @ work + (_NOISE * expected) ** 2
    bound = _OUTLIER * variance**0.5
    gain = covariance @ work / variance
    values = values + gain * np.clip(seconds - expected, -bound, bound)
    covariance = covariance - np.outer(gain, work @ covariance)
    covariance = (covariance + covariance.T) / 2
    return Costs(_plausible(values, len(sizes.widths), expected), covariance, True, surprise)


def _outlier(
    work: Float[np.ndarray, "unknowns"],
    covariance: Float[np.ndarray, "unknowns unknowns"],
    deviation: float,
    expected: float,
) -> int:
    """The sign of a deviation that is too large for chance, else 0."""
    variance = work @ covariance @ work + (_NOISE * expected) ** 2
    return int(np.sign(deviation)) if abs(deviation) > _OUTLIER * variance**0.5 else 0


def _plausible(
    values: Float[np.ndarray, "unknowns"], num_widths: int, expected: float
) -> Float[np.ndarray, "unknowns"]:
    """No cost below 0, and no pass below half of the narrowest (on accelerators 0.86 was seen)."""
    passes = np.cumsum(values[1 : num_widths + 1])
    passes[0] = max(passes[0], 1e-4 * expected)
    passes = np.maximum(passes, passes[0] / 2)
    others = np.maximum(values, 0)
    return np.concatenate([others[:1], np.diff(passes, prepend=0), others[num_widths + 1 :]])
