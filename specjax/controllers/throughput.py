"""Expected tokens per second under given limits, and the uncertainty of this estimate."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.controllers.acceptance_estimates import Forecast
from specjax.controllers.base import StepSizes
from specjax.controllers.cost_estimates import NOISE, Costs, count_work

_MOST_ARMS = 256
"""The largest number of limits to compare; if all lengths would give more, some are omitted."""
_ALL_LENGTHS = 8
"""The number of nodes up to which all lengths of a drafter are considered."""


class Estimates(NamedTuple):
    """The current estimates of costs and of acceptance."""

    sizes: StepSizes
    costs: Costs
    outlook: Forecast

    @property
    def plain_s(self) -> float:
        """The time of a pass of plain decoding, in seconds."""
        return float(self.costs.seconds[1])


class Rates(NamedTuple):
    """The expected tokens and time of a round under each of A limits (`arms`).

    `seconds` include the round's share of the step's overhead, `round_s` do not. `work` counts how
    often each unknown of the costs occurs in a round, and `turns` in how many rows each drafter
    drafts. `mean` is the expected number of tokens per second.
    """

    arms: Int[np.ndarray, "A drafters"]
    tokens: Float[np.ndarray, "A"]
    seconds: Float[np.ndarray, "A"]
    round_s: Float[np.ndarray, "A"]
    work: Float[np.ndarray, "A unknowns"]
    turns: Float[np.ndarray, "A drafters"]
    mean: Float[np.ndarray, "A"]


@functools.lru_cache(maxsize=64)
def arms_of(sizes: StepSizes) -> Int[np.ndarray, "A drafters"]:
    """Return the limits to compare, one row each; the first are those of plain decoding."""
    grids = [_lengths(sizes, drafter.num_nodes) for drafter in sizes.drafters]
    while np.prod([len(grid) for grid in grids]) > _MOST_ARMS and max(map(len, grids)) > 2:
        # Omit every second length of the drafter with the most, but not 0 and the longest.
        longest = max(grids, key=len)
        grids[grids.index(longest)] = [0, *reversed(longest[:0:-2])]
    if np.prod([len(grid) for grid in grids]) <= _MOST_ARMS:
        return np.array(list(itertools.product(*grids)), int).reshape(-1, len(grids))
    most = np.array([grid[-1] for grid in grids])
    return np.concatenate([0 * most[None], np.diag(most), most[None]])


def _lengths(sizes: StepSizes, most: int) -> list[int]:
    """Return the limits to consider for a drafter of `most` nodes, ascending: all, or some."""
    if most <= _ALL_LENGTHS:
        return list(range(most + 1))
    powers = {2**power for power in range(most.bit_length())}
    return sorted({0, most} | powers | {width - 1 for width in sizes.widths if width <= most})


def expected_rates(
    estimates: Estimates, arms: Int[np.ndarray, "A drafters"], rows: float, rounds: int
) -> Rates:
    """Return the expected tokens and time of a round under each of the limits `arms`.

    `estimates` are those of costs and acceptance. A step has `rounds` rounds of `rows` rows.
    Drafters take turns: each drafts in the rows in which no earlier one did.
    """
    sizes, costs, outlook = estimates
    widths = np.array(sizes.widths)
    waiting = np.ones(len(arms))
    turns, ran, further = np.zeros((3, *arms.shape))
    narrower = np.ones((len(arms), len(widths)))  # the probability that a pass is no wider
    nodes = np.minimum(widths, outlook.reaches.shape[1]) - 1
    tokens = np.full(len(arms), float(rows))
    for number, drafter in enumerate(sizes.drafters):
        longest = arms[:, number]
        runs = longest > 0
        ran[:, number] = runs * (1 - (1 - waiting) ** rows)
        if drafter.stops:
            further[:, number] = ran[:, number] * outlook.passes[number][longest]
        wider = outlook.reaches[number][nodes] * (longest[:, None] > nodes)
        narrower *= 1 - ran[:, [number]] * wider
        turns[:, number] = rows * waiting * runs * outlook.drafts[number]
        tokens += turns[:, number] * outlook.tokens[number][longest]
        waiting = waiting - turns[:, number] / rows
    passes = narrower.copy()
    passes[:, 1:] -= narrower[:, :-1]
    work = count_work(np.full(len(arms), 1 / rounds), passes, ran, further)
    seconds = work @ costs.seconds
    round_s = seconds - costs.seconds[0] / rounds
    return Rates(arms, tokens, seconds, round_s, work, turns, tokens / seconds)


def highest_rates(
    estimates: Estimates, arms: Int[np.ndarray, "A drafters"], rows: float, rounds: int
) -> Float[np.ndarray, "A"]:
    """Return the tokens per second under each of the limits `arms` if all drafts were accepted.

    In each row the drafter drafts whose accepted drafts would pay best, as long as its limit
    allows.
    """
    sizes, costs, _ = estimates
    widths, count = np.array(sizes.widths), len(sizes.drafters)
    highest = np.full(len(arms), rows / (costs.seconds[1] + costs.seconds[0] / rounds))
    for number, drafter in enumerate(sizes.drafters):
        longest = arms[:, number]
        path = drafter.num_nodes if drafter.longest_path is None else drafter.longest_path
        ran = np.eye(count)[number] * (longest[:, None] > 0)
        further = ran * np.maximum(longest - 1, 0)[:, None] * drafter.stops
        passes = np.eye(len(widths))[np.searchsorted(widths, 1 + longest)]
        work = count_work(np.full(len(arms), 1 / rounds), passes, ran, further)
        tokens = rows * (1 + np.minimum(longest, path))
        highest = np.maximum(highest, np.where(longest > 0, tokens / (work @ costs.seconds), 0))
    return highest


def deviations(
    estimates: Estimates, rates: Rates, base: int
) -> tuple[Float[np.ndarray, "A"], Float[np.ndarray, "A"]]:
    """Return two measures of each arm's uncertainty, relative to arm number `base`.

    The first is the relative standard deviation of the quotient of the two arms' rates. The second
    is the part of it that one measured step under the arm's limits would resolve. Nodes that both
    arms draft, and the overall speed of the machine, cancel.
    """
    _, costs, outlook = estimates
    work = rates.work / rates.seconds[:, None]
    difference = work - work[base]
    spread = difference @ costs.covariance
    variance = (spread * difference).sum(axis=1)
    measured = ((work @ costs.covariance) * work).sum(axis=1) + NOISE**2
    resolved = (spread * work).sum(axis=1) ** 2 / measured
    tokens = np.zeros(len(rates.arms))
    for number, longest in enumerate(rates.arms.T):
        sums, shared = outlook.tokens_deviation[number], np.minimum(longest, longest[base])
        per_turn = sums[longest] - sums[shared]
        unshared = (shared == 0) * outlook.tokens[number][longest]
        per_turn += unshared * outlook.drafts_deviation[number]
        tokens += rates.turns[:, number] * per_turn
    tokens = (tokens / rates.tokens) ** 2
    return np.sqrt(np.maximum(variance, 0) + tokens), np.sqrt(resolved + tokens)
