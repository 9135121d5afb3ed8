"""Tokens per second of rounds under given limits, and how uncertain they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.controllers.acceptance import Forecast
from specjax.controllers.base import StepSizes
from specjax.controllers.costs import NOISE, Costs, count_work


class Estimates(NamedTuple):
    """All that is known of costs and drafters."""

    sizes: StepSizes
    costs: Costs
    outlook: Forecast

    @property
    def plain_s(self) -> float:
        """Seconds of a plain pass."""
        return float(self.costs.seconds[1])


class Rates(NamedTuple):
    """What a round is expected to emit and cost under several limits, the `arms`.

    `work` says how often each unknown of the costs occurs in a round, and `turns` in how many rows
    each drafter drafts.
    """

    arms: Int[np.ndarray, "A drafters"]
    tokens: Float[np.ndarray, "A"]
    seconds: Float[np.ndarray, "A"]
    work: Float[np.ndarray, "A unknowns"]
    turns: Float[np.ndarray, "A drafters"]

    @property
    def mean(self) -> Float[np.ndarray, "A"]:
        """Tokens per second."""
        return self.tokens / self.seconds


def expected_rates(
    estimates: Estimates, arms: Int[np.ndarray, "A drafters"], rows: float, rounds: int
) -> Rates:
    """What a round of steps of so many rounds is expected to emit and cost under each limits.

    Drafters take turns: each drafts in the rows in which no earlier one did.
    """
    sizes, costs, outlook = estimates
    widths = np.array(sizes.widths)
    waiting = np.ones(len(arms))
    turns, ran, further = np.zeros((3, *arms.shape))
    narrower = np.ones((len(arms), len(widths)))  # the chance that a pass is no wider
    nodes = np.minimum(widths, outlook.reaches.shape[1]) - 1
    tokens = np.full(len(arms), rows)
    for number, drafter in enumerate(sizes.drafters):
        longest = arms[:, number]
        ran[:, number] = (longest > 0) * (1 - (1 - waiting) ** rows)
        further[:, number] = ran[:, number] * outlook.passes[number][longest] * drafter.stops
        wider = outlook.reaches[number][nodes] * (longest[:, None] > nodes)
        narrower *= 1 - ran[:, [number]] * wider
        turns[:, number] = rows * waiting * (longest > 0) * outlook.drafts[number]
        tokens = tokens + turns[:, number] * outlook.tokens[number][longest]
        waiting = waiting - turns[:, number] / rows
    passes = np.diff(narrower, axis=1, prepend=0)
    work = count_work(np.full(len(arms), 1 / rounds), passes, ran, further)
    return Rates(arms, tokens, work @ costs.seconds, work, turns)


def deviation(
    estimates: Estimates, rates: Rates, base: int, told: bool = False
) -> Float[np.ndarray, "A"]:
    """How uncertain it is by what factor each rate differs from that of `base`, relative.

    Nodes that are drafted under both limits count for nothing, nor does the machine's speed. With
    `told` that is the part of it that a step under those limits would tell.
    """
    _, costs, outlook = estimates
    work = rates.work / rates.seconds[:, None]
    difference = work - work[base]
    spread = difference @ costs.covariance
    variance = (spread * difference).sum(axis=1)
    if told:
        measured = ((work @ costs.covariance) * work).sum(axis=1) + NOISE**2
        variance = (spread * work).sum(axis=1) ** 2 / measured
    tokens = np.zeros(len(rates.arms))
    for number, longest in enumerate(rates.arms.T):
        sums, shared = outlook.tokens_deviation[number], np.minimum(longest, longest[base])
        own = sums[longest] - sums[shared]
        own += (shared == 0) * outlook.drafts_deviation[number] * outlook.tokens[number][longest]
        tokens += rates.turns[:, number] * own
    return np.sqrt(np.maximum(variance, 0) + (tokens / rates.tokens) ** 2)
