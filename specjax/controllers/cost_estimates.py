"""Estimated costs of steps, from seconds and counts, by recursive least squares with forgetting.

The seconds of a step are modeled as a sum: a constant (dispatch), passes by compiled width, and
each drafter's first and further passes. These unknowns are estimated from ordinary steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Real

from specjax.controllers.base import StepRecord, StepSizes

NOISE = 0.07
"""The relative standard deviation of a step's measured seconds."""
_FIRST_RUN_NOISE = 0.3
"""The same for a step in which a drafter runs for the first time, which may take twice as long."""
# Assumptions before the first step, in units of a plain pass: mean and standard deviation.
_CONSTANT = (0.0, 0.03)
"""The overhead of a step, in addition to `StepSizes.dispatch_s`, which may be off by half."""
_PASS = (1.0, 1.0)
_SLOT = (0.1, 0.1)
"""The cost of each further slot of a pass; a fifth of this if wide passes are cheap."""
_NOTICED = 0.2
"""The share of a first step's time below which its dispatch is ignored on a CPU."""
_FIRST = (0.15, 0.5)
_FURTHER = (0.1, 0.2)
_DOUBT = 3.0
"""The factor of the deviations of what is assumed, before costs are measured one by one."""
_COMMON_DRIFT, _OWN_DRIFT = 0.03, 0.015
"""The relative change from one step to the next of all costs together, and of each separately."""
_JUMP = 30.0
"""The factor of a deviation above which a time is ignored, unless the next one deviates too."""
_OUTLIER = 3.0
"""The number of standard deviations to which a step's deviation is clipped."""
_WELL_KNOWN = 0.2
"""The relative standard deviation below which a step's cost counts as known."""
_LEAST, _MOST = 1e-7, 1e6
"""The range of a step's seconds that are plausible."""


class Costs(NamedTuple):
    """Estimates of the unknowns, in the order of `count_work`, and their covariance.

    The unknown of a compiled width is the extra cost of its pass over the next narrower one, so
    that the estimates of widths that never ran follow those of others. `seconds` are the estimates
    clipped to plausible values. `rounds` counts the rounds in which each drafter was timed. `known`
    is False before the first step, when all values are in units of a plain pass. `surprise` is the
    sign of the last step's deviation if it was an outlier, else 0.
    """

    estimates: Float[np.ndarray, "unknowns"]
    covariance: Float[np.ndarray, "unknowns unknowns"]
    seconds: Float[np.ndarray, "unknowns"]
    rounds: Int[np.ndarray, "drafters"]
    known: bool = False
    surprise: int = 0


def initial_costs(sizes: StepSizes) -> Costs:
    """Return the costs assumed before the first step, in units of a plain pass."""
    gaps, count = np.diff(sizes.widths), len(sizes.drafters)
    slot = np.array(_SLOT) / (5 if sizes.wide_is_cheap else 1)
    kinds = zip(_CONSTANT, _PASS, slot, _FIRST, _FURTHER, strict=True)
    mean, deviation = (
        np.concatenate([[constant, plain_pass], slot * gaps, [first] * count, [further] * count])
        for constant, plain_pass, slot, first, further in kinds
    )
    return Costs(mean, np.diag(deviation**2), mean, np.zeros(count, int))


def doubtful(costs: Costs) -> Costs:
    """Return the assumed costs with so much doubt that single steps, made to measure, decide.

    These are no first runs. The overhead of a step, and a plain pass, are as certain as before.
    """
    factors = np.where(np.arange(len(costs.estimates)) < 2, 1.0, _DOUBT)
    covariance = costs.covariance * np.outer(factors, factors)
    return costs._replace(covariance=covariance, rounds=np.ones_like(costs.rounds))


def count_work(
    steps: Real[np.ndarray, "*A"],
    passes: Real[np.ndarray, "*A widths"],
    ran: Real[np.ndarray, "*A drafters"],
    further: Real[np.ndarray, "*A drafters"],
) -> Real[np.ndarray, "*A unknowns"]:
    """Return how often each unknown occurs in the time of a step, or of each of A steps.

    The unknowns are the constant of a step, a pass at least as wide as each compiled width, and the
    first and further passes of each drafter.
    """
    at_least = np.cumsum(passes[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([steps[..., None], at_least, ran, further], axis=-1)


def learn_costs(costs: Costs, sizes: StepSizes, record: StepRecord) -> Costs:
    """Return the costs updated with a step's record, or unchanged if it has no seconds."""
    seconds = record.seconds
    if seconds is None or not _LEAST < seconds < _MOST or not record.rounds:
        return costs
    stops = np.array([drafter.stops for drafter in sizes.drafters], int)
    work = count_work(np.ones(()), record.passes, record.ran, record.further * stops)
    if costs.known:
        sign = _jump(seconds, float(work @ costs.seconds))
        if sign and sign != costs.surprise:
            return costs._replace(surprise=sign)
        if sign:  # two jumps in the same direction: start again
            costs = initial_costs(sizes)
    if not costs.known:
        costs = _in_seconds(costs, seconds, sizes, work)
    values, covariance = costs.estimates, costs.covariance
    expected = max(float(work @ values), float(work @ costs.seconds) / 2)
    first_run = not costs.known or (record.ran * (costs.rounds == 0)).any()
    deviation = seconds - expected
    noise = ((_FIRST_RUN_NOISE if first_run else NOISE) * expected) ** 2
    common = np.outer(values, values)
    covariance = covariance + _COMMON_DRIFT**2 * common + np.diag((_OWN_DRIFT * values) ** 2)
    variance = work @ covariance @ work
    surprise = 0
    if variance < (_WELL_KNOWN * expected) ** 2:
        surprise = int(np.sign(deviation)) * (deviation**2 > _OUTLIER**2 * (variance + noise))
    if surprise and surprise == costs.surprise:
        # Two outliers in the same direction: the machine's speed changed, and with it all costs.
        covariance = covariance + (deviation / expected) ** 2 * common
        variance = work @ covariance @ work
    bound = _OUTLIER * (variance + noise) ** 0.5
    gain = covariance @ work / (variance + noise)
    values = values + gain * np.clip(deviation, -bound, bound)
    covariance = covariance - np.outer(gain, work @ covariance)
    covariance = (covariance + covariance.T) / 2
    plausible = _plausible(values, covariance, len(sizes.widths))
    return Costs(values, covariance, plausible, costs.rounds + record.ran, True, surprise)


def _jump(seconds: float, expected: float) -> int:
    """Return the sign of a deviation that is too large to come from a changing load, else 0.

    Such jumps come from a clock, for example.
    """
    return int(seconds > _JUMP * expected) - int(seconds * _JUMP < expected)


def _in_seconds(
    costs: Costs, seconds: float, sizes: StepSizes, work: Float[np.ndarray, "unknowns"]
) -> Costs:
    """Return the costs converted from plain passes to seconds, given the first step's seconds."""
    constant = min(sizes.dispatch_s, 0.75 * seconds)
    if not sizes.wide_is_cheap and constant < _NOTICED * seconds:
        constant = 0.0
    unit = (seconds - constant) / (work @ costs.estimates)
    values, covariance = costs.estimates * unit, costs.covariance * unit**2
    values[0] += constant
    covariance[0, 0] += (constant / 2) ** 2
    return costs._replace(estimates=values, covariance=covariance, seconds=values)


def _plausible(
    estimates: Float[np.ndarray, "unknowns"],
    covariance: Float[np.ndarray, "unknowns unknowns"],
    num_widths: int,
) -> Float[np.ndarray, "unknowns"]:
    """Return estimates corrected so that no cost is negative and no pass too cheap.

    A wider pass costs at least half of the narrowest one (on accelerators, a pass over five slots
    took 0.86 of the time of a pass over one). Correcting one estimate changes others by their
    covariance. The stored estimates do not change, so that later steps correct them in the same
    way.
    """
    values = estimates.copy()
    for number in (0, *range(num_widths + 1, len(values))):
        if values[number] < 0:
            values -= covariance[:, number] * (values[number] / covariance[number, number])
    passes = np.cumsum(values[1 : num_widths + 1])
    passes[0] = max(passes[0], 0.01 * np.abs(values).sum())
    values = np.maximum(values, 0)
    values[1 : num_widths + 1] = np.diff(np.maximum(passes, passes[0] / 2), prepend=0)
    return values
