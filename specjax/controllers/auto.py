"""The controller that learns: limits by expected tokens per second.

It keeps two estimates from ordinary steps: what things cost (`costs.py`) and what drafts bring
(`acceptance.py`). Each step takes the limits with most expected tokens per second, unless others
might be better, for all that is known, and trying them costs no more than what may be spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from specjax.controllers.acceptance import (
    Acceptance,
    forecast,
    learn_acceptance,
    no_counts,
)
from specjax.controllers.base import Limits, StepRecord, StepSizes
from specjax.controllers.costs import Costs, count_work, initial_costs, learn_costs

_SHORT_TRIAL = 2
"""Tokens of the first draft of a drafter whose every token costs a pass."""
_ALL_LENGTHS = 8
"""Drafters of more nodes are tried with some numbers of them only."""


class Planned(NamedTuple):
    """A step that was chosen: the limits, and those it is tried instead of (None: the best)."""

    longest: tuple[int, ...]
    instead_of: tuple[int, ...] | None = None


class AutoState(NamedTuple):
    """What `Auto` has learned, and the steps that are under way.

    `credit` are the plain rounds that trials may cost.
    """

    sizes: StepSizes
    costs: Costs
    counts: Acceptance
    credit: float
    under_way: tuple[Planned, ...] = ()


class Rates(NamedTuple):
    """Of several limits: what a round is expected to emit and cost, and standard deviations."""

    tokens: Float[np.ndarray, "A"]
    tokens_deviation: Float[np.ndarray, "A"]
    seconds: Float[np.ndarray, "A"]
    seconds_deviation: Float[np.ndarray, "A"]

    @property
    def mean(self) -> Float[np.ndarray, "A"]:
        """Tokens per second."""
        return self.tokens / self.seconds

    def shifted(self, deviations: float) -> Float[np.ndarray, "A"]:
        """Tokens per second, if both are off by so many standard deviations."""
        seconds = self.seconds - deviations * self.seconds_deviation
        tokens = self.tokens + deviations * self.tokens_deviation
        return np.maximum(tokens, 0) / np.maximum(seconds, self.seconds / 4)


@dataclass(frozen=True)
class Auto:
    """Limits that are expected to emit most tokens per second.

    Trials of other limits cost at most `first_credit` plain rounds and the share `trial_share` of
    the time; they are made where those would be better if the estimates were off by `optimism`
    standard deviations. Where the best limits may be worse than others, steps are short.
    """

    trial_share: float = 0.02
    first_credit: float = 2.0
    optimism: float = 1.0

    def init(self, sizes: StepSizes) -> AutoState:
        """Nothing is known but the sizes."""
        return AutoState(sizes, initial_costs(sizes), no_counts(sizes), self.first_credit)

    def choose(
        self, state: AutoState, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, AutoState]:
        """The next step's limits and rounds."""
        planned, rounds = self._plan(state, max(unfinished, 1), most_rounds)
        limits = Limits(planned.longest, (0.0,) * len(planned.longest))
        return limits, rounds, state._replace(under_way=(*state.under_way, planned))

    def update(self, state: AutoState, record: StepRecord) -> AutoState:
        """The state after a step, whose cost is charged if it was a trial."""
        costs = learn_costs(state.costs, state.sizes, record)
        state = state._replace(costs=costs, counts=learn_acceptance(state.counts, record))
        planned, under_way = state.under_way[0], state.under_way[1:]
        rounds = record.rounds
        if not rounds:
            return state._replace(under_way=under_way)
        none = (0,) * len(planned.longest)
        arms = np.array([planned.longest, planned.instead_of or planned.longest, none])
        rates = _rates(state, arms, record.row_rounds / rounds, rounds)
        plain_rounds = rounds * rates.seconds / rates.seconds[2]
        loss = plain_rounds[0] * (1 - min(rates.mean[0] / rates.mean[1], 1))
        credit = state.credit + self.trial_share * plain_rounds[0] - loss
        return state._replace(credit=float(credit), under_way=under_way)

    def _plan(self, state: AutoState, rows: int, most_rounds: int) -> tuple[Planned, int]:
        """What to do next, and for how many rounds."""
        sizes = state.sizes
        none = (0,) * len(sizes.drafters)
        if not any(one.num_nodes for one in sizes.drafters):
            return Planned(none), most_rounds
        if not state.costs.known:
            return Planned(none if not state.under_way else _first_trial(sizes)), 1
        seen = tuple(bool(ran) for ran in state.counts.rounds_ran)
        best, rates, arms = _best(state, seen, rows, most_rounds)
        trial = self._trial(state, rates, arms, best)
        best_limits = tuple(int(count) for count in arms[best])
        if trial is not None:
            loss = rates.seconds[trial] * (1 - rates.mean[trial] / rates.mean[best])
            rounds = state.credit * _plain_seconds(state) / max(loss, 1e-12)
            limits = tuple(int(count) for count in arms[trial])
            return Planned(limits, best_limits), int(np.clip(rounds, 1, most_rounds))
        return Planned(best_limits), self._rounds(state, rates, arms, best, most_rounds)

    def _trial(
        self, state: AutoState, rates: Rates, arms: Int[np.ndarray, "A drafters"], best: int
    ) -> int | None:
        """The limits that are worth a trial, if any, by number."""
        if any(planned.instead_of for planned in state.under_way):
            return None
        hopes = rates.shifted(self.optimism)
        loss = rates.seconds * (1 - rates.mean / rates.mean[best])
        allowed = loss <= state.credit * _plain_seconds(state)
        allowed &= hopes > rates.mean[best]
        allowed[best] = False
        if not allowed.any():
            return None
        return int(np.argmax(np.where(allowed, hopes, 0)))

    def _rounds(
        self,
        state: AutoState,
        rates: Rates,
        arms: Int[np.ndarray, "A drafters"],
        best: int,
        most_rounds: int,
    ) -> int:
        """As many rounds as cost little if the best limits should be worse than others."""
        others = ((arms > 0) != (arms[best] > 0)).any(axis=1)
        if not others.any() or not arms[best].any():
            return most_rounds
        fears = rates.shifted(-self.optimism)[best] / rates.mean[others].max()
        loss = rates.seconds[best] * max(1 - fears, 1e-12)
        allowed = max(state.credit, 0.5) * _plain_seconds(state) + state.costs.constant
        return int(np.clip(allowed / loss, 1, most_rounds))


def _plain_seconds(state: AutoState) -> float:
    """Seconds of a plain pass."""
    return float(state.costs.seconds[1])


def _first_trial(sizes: StepSizes) -> tuple[int, ...]:
    """Short drafts: as wide as the narrowest pass for drafts."""
    width = next((width for width in sizes.widths if width > 1), sizes.widths[-1])
    return tuple(
        min(one.num_nodes, width - 1, _SHORT_TRIAL if one.stops else width)
        for one in sizes.drafters
    )


def _lengths(sizes: StepSizes, number: int) -> list[int]:
    """The limits that are considered for a drafter: all, or a grid and what fills each width."""
    most = sizes.drafters[number].num_nodes
    if most <= _ALL_LENGTHS:
        return list(range(most + 1))
    grid = {0, most, *(2**power for power in range(most.bit_length()))}
    return sorted(grid | {width - 1 for width in sizes.widths if width <= most})


def _best(
    state: AutoState, seen: tuple[bool, ...], rows: int, most_rounds: int
) -> tuple[int, Rates, Int[np.ndarray, "A drafters"]]:
    """Limits to consider, their rates, and the number of the best of those whose drafters ran.

    One drafter's limit after another is improved, from each drafter by itself and from none on.
    """
    count = len(state.sizes.drafters)
    grids = [_lengths(state.sizes, number) for number in range(count)]
    current = np.zeros(count, int)
    for turn in range(3):
        arms = [current]
        for number, grid in enumerate(grids):
            for base in (current, np.zeros(count, int)):
                moved = np.repeat(base[None], len(grid), axis=0)
                moved[:, number] = grid
                arms.extend(moved)
        candidates = np.unique(np.array(arms), axis=0)
        rates = _rates(state, candidates, rows, most_rounds)
        allowed = ~((candidates > 0) & ~np.array(seen)).any(axis=1)
        best = int(np.argmax(np.where(allowed, rates.mean, 0)))
        if turn and (candidates[best] == current).all():
            break
        current = candidates[best]
    return best, rates, candidates


def _rates(
    state: AutoState, arms: Int[np.ndarray, "A drafters"], rows: float, rounds: int
) -> Rates:
    """What rounds under each of the limits `arms` are expected to emit and cost.

    Drafters take turns: each drafts in the rows in which no earlier one did.
    """
    outlook = forecast(state.counts)
    widths = np.array(state.sizes.widths)
    shape = (len(arms), len(state.sizes.drafters))
    waiting, tokens, deviation = np.ones(shape[0]), np.ones(shape[0]), np.zeros(shape[0])
    ran, further = np.zeros(shape), np.zeros(shape)
    narrower = np.ones((shape[0], len(widths)))  # the chance that a pass is no wider
    reached = np.pad(outlook.reaches, ((0, 0), (0, 1)))
    most = reached.shape[1] - 1
    for number, drafter in enumerate(state.sizes.drafters):
        longest = arms[:, number]
        runs = longest > 0
        ran[:, number] = runs * (1 - (1 - waiting) ** rows)
        if drafter.stops:
            sums = np.concatenate([[0, 0], np.cumsum(outlook.reaches[number])[:most]])
            further[:, number] = ran[:, number] * sums[longest]
        nodes = np.minimum(widths - 1, most)
        wider = reached[number][nodes] * (longest[:, None] > nodes)
        narrower *= 1 - ran[:, [number]] * wider
        share = waiting * runs * outlook.drafts[number]
        tokens += share * outlook.tokens[number][longest]
        deviation += share * outlook.tokens_deviation[number][longest]
        deviation += waiting * outlook.drafts_deviation[number] * outlook.tokens[number][longest]
        waiting = waiting - share
    passes = np.diff(narrower, axis=1, prepend=0)
    work = count_work(np.full(shape[0], 1 / rounds), passes, ran, further)
    variance = np.einsum("ai,ij,aj->a", work, state.costs.covariance, work)
    seconds = work @ state.costs.seconds
    return Rates(rows * tokens, rows * deviation, seconds, np.sqrt(np.maximum(variance, 0)))
