"""What steps cost: seconds explained by counts, by recursive least squares with forgetting.

A step's seconds are a sum over what it did: a constant (its dispatch), its passes by compiled
width, and each drafter's first and further passes. The unknowns are estimated from ordinary steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

from specjax.controllers.base import StepRecord, StepSizes

# Before the first step, in plain passes: a mean and a standard deviation each.
_CONSTANT = (0.0, 0.03)
"""Beside `StepSizes.dispatch_s`, which may be off by as much again."""
_PASS = (1.0, 1.0)
_SLOT = (0.1, 0.1)
"""Each further slot of a pass."""
_FIRST = (0.15, 0.5)
_FURTHER = (0.1, 0.2)

NOISE = 0.07
"""Of a step's seconds, relative."""
_COMMON_DRIFT, _OWN_DRIFT = 0.03, 0.015
"""How much all costs together, and each by itself, may change from one step to the next."""
_OUTLIER = 3.0
"""Deviations, in standard deviations, beyond which a step counts as no further off."""
_WELL_KNOWN = 0.2
"""The relative standard deviation below which a step's cost counts as known."""
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

    def plausible(self, num_widths: int) -> Float[np.ndarray, "unknowns"]:
        """The estimates within what can be: no cost below 0, passes at least half of the first.

        (On accelerators a pass over five slots took 0.86 of one over one.) What is corrected in one
        changes the others as far as they are known together only. The estimates themselves are left
        as they are, so that later steps correct them likewise.
        """
        values = self.seconds.copy()
        drafters = range(num_widths + 1, len(values))
        for number in (0, *drafters):
            if values[number] < 0:
                column = self.covariance[:, number]
                values -= column * (values[number] / column[number])
        passes = np.cumsum(values[1 : num_widths + 1])
        passes[0] = max(passes[0], 1e-2 * np.abs(values).sum())
        passes = np.diff(np.maximum(passes, passes[0] / 2), prepend=0)
        values = np.maximum(values, 0)
        return np.concatenate([values[:1], passes, values[num_widths + 1 :]])


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
    passes: Num[np.ndarray, "*A widths"],
    ran: Num[np.ndarray, "*A drafters"],
    further: Num[np.ndarray, "*A drafters"],
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
        values, covariance = _scaled(costs, sizes, seconds, work)
    drift = _COMMON_DRIFT**2 * np.outer(values, values) + np.diag((_OWN_DRIFT * values) ** 2)
    expected = max(
        work @ values, work @ costs._replace(seconds=values).plausible(len(sizes.widths)) / 2
    )
    surprise = _outlier(work, covariance + drift, seconds - expected, expected)
    if surprise and surprise == costs.surprise:
        # Twice in the same direction: the machine's speed has changed, and with it all costs.
        drift += ((seconds - expected) / expected) ** 2 * np.outer(values, values)
    covariance = covariance + drift
    variance = work @ covariance @ work + (NOISE * expected) ** 2
    bound = _OUTLIER * variance**0.5
    gain = covariance @ work / variance
    values = values + gain * np.clip(seconds - expected, -bound, bound)
    covariance = covariance - np.outer(gain, work @ covariance)
    covariance = (covariance + covariance.T) / 2
    return Costs(values, covariance, True, surprise)


def _scaled(
    costs: Costs, sizes: StepSizes, seconds: float, work: Float[np.ndarray, "unknowns"]
) -> tuple[Float[np.ndarray, "unknowns"], Float[np.ndarray, "unknowns unknowns"]]:
    """Values and covariance in seconds, of those in plain passes, by the first step's seconds."""
    constant = min(sizes.dispatch_s, 0.75 * seconds)
    unit = (seconds - constant) / (work @ costs.seconds)
    values, covariance = costs.seconds * unit, costs.covariance * unit**2
    values[0] += constant
    covariance[0, 0] += constant**2
    return values, covariance


def _outlier(
    work: Float[np.ndarray, "unknowns"],
    covariance: Float[np.ndarray, "unknowns unknowns"],
    deviation: float,
    expected: float,
) -> int:
    """The sign of a deviation that is too large for chance, else 0, as where little is known."""
    variance = work @ covariance @ work
    if variance > (_WELL_KNOWN * expected) ** 2:
        return 0
    bound = _OUTLIER * (variance + (NOISE * expected) ** 2) ** 0.5
    return int(np.sign(deviation)) if abs(deviation) > bound else 0
