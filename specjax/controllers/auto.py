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
    Forecast,
    forecast,
    learn_acceptance,
    no_counts,
)
from specjax.controllers.base import Limits, StepRecord, StepSizes
from specjax.controllers.costs import NOISE, Costs, count_work, initial_costs, learn_costs

_SHORT_TRIAL = 2
"""Tokens of the first draft of a drafter whose every token costs a pass."""
_WORTH_A_TRIAL = 1.01
"""How much better than the best limits others have to be, if all goes well, to be tried."""
_LEAST_CREDIT = 0.5
"""Plain rounds that a step of the best limits may lose in any case."""
_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
_DOUBTFUL_ROUNDS = 8
"""Rounds of a drafter after which it is tried again half as often, if it did not pay."""
_LEAST_HOPE = 0.7
_FEW_ROUNDS = 8
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
    """What a round is expected to emit and cost under several limits, the `arms`.

    `work` says how often each unknown of the costs occurs in a round, and `shares` in what share of
    the rows each drafter drafts.
    """

    arms: Int[np.ndarray, "A drafters"]
    tokens: Float[np.ndarray, "A"]
    seconds: Float[np.ndarray, "A"]
    work: Float[np.ndarray, "A unknowns"]
    shares: Float[np.ndarray, "A drafters"]

    @property
    def mean(self) -> Float[np.ndarray, "A"]:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Auto:
    """Limits that are expected to emit most tokens per second.

    Trials of other limits cost at most `first_credit` plain rounds and the share `trial_share` of
    the time; they are made where those would be better if the estimates were off by `optimism`
    standard deviations. Where the best limits may be worse than others, steps are short.
    """

    trial_share: float = 0.01
    first_credit: float = 2.0
    optimism: float = 1.0

    def init(self, sizes: StepSizes) -> AutoState:
        """Nothing is known but the sizes."""
        return AutoState(sizes, initial_costs(sizes), no_counts(sizes), self.first_credit)

    def choose(
        self, state: AutoState, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, AutoState]:
        """The next step's limits and rounds."""
        rows = max(unfinished, 1)
        planned, rounds = self._plan(state, rows, most_rounds)
        limits = Limits(planned.longest, _confidence(state, planned.longest, rows))
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
        rates = _rates(state, forecast(state.counts), arms, record.row_rounds / rounds, rounds)
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
            first = Planned(_first_trial(sizes), none) if state.under_way else Planned(none)
            return first, self._first_rounds(state, most_rounds)
        outlook = forecast(state.counts)
        best, rates = _best(state, outlook, rows, most_rounds)
        best_limits = tuple(rates.arms[best].tolist())
        trial = self._trial(state, outlook, rates, best)
        if trial is None:
            return Planned(best_limits), self._rounds(state, outlook, rates, best, most_rounds)
        limits = tuple(rates.arms[trial].tolist())
        rounds = self._rounds(state, outlook, rates, trial, most_rounds, best)
        if (state.counts.rounds_ran[rates.arms[trial] > 0] == 0).any():
            rounds = self._first_rounds(state, most_rounds)
        return Planned(limits, best_limits), rounds

    def _first_rounds(self, state: AutoState, most_rounds: int) -> int:
        """The rounds of a step of unknown cost: few, but more where steps cost by themselves."""
        return min(_FEW_ROUNDS, most_rounds) if state.sizes.dispatch_s else 1

    def _trial(self, state: AutoState, outlook: Forecast, rates: Rates, best: int) -> int | None:
        """The limits that are worth a trial, if any, by number."""
        if any(planned.instead_of for planned in state.under_way):
            return None
        told = _deviation(state, outlook, rates, best, told=True)
        # The more may be spent, the more is hoped for.
        optimism = self.optimism * max(state.credit / self.first_credit, _LEAST_HOPE)
        hopes = rates.mean * np.exp(optimism * told)
        loss = rates.seconds * (1 - rates.mean / rates.mean[best])
        credit = state.credit * _plain_seconds(state)
        allowed = (loss <= credit) & (hopes > rates.mean[best] * _WORTH_A_TRIAL)
        # Drafters that did not pay are tried again in any case: one step may have been misleading.
        woken = (rates.arms > 0) & (rates.arms[best] == 0)
        doubts = _DOUBTFUL_ROUNDS / (woken @ state.counts.rounds_ran + _DOUBTFUL_ROUNDS)
        allowed |= woken.any(axis=1) & (2 * loss <= credit * doubts)
        unknown = state.counts.rounds_ran == 0
        allowed &= (~unknown | (rates.arms <= np.array(_first_trial(state.sizes)))).all(axis=1)
        allowed[best] = False
        if not allowed.any():
            return None
        return int(np.argmax(np.where(allowed, hopes, 0)))

    def _rounds(
        self,
        state: AutoState,
        outlook: Forecast,
        rates: Rates,
        number: int,
        most_rounds: int,
        rival: int | None = None,
    ) -> int:
        """As many rounds under limits as cost little if these are bad.

        `rival` is what the time is worth otherwise: else the best limits of other drafters.
        """
        credit = state.credit
        if rival is None:
            if not rates.arms[number].any():
                return most_rounds
            others = ((rates.arms > 0) != (rates.arms[number] > 0)).any(axis=1)
            rival = int(np.argmax(np.where(others, rates.mean, 0)))
            credit = max(credit, _LEAST_CREDIT)
        deviation = _deviation(state, outlook, rates, rival)[number]
        fear = rates.mean[number] * np.exp(-self.optimism * deviation) / rates.mean[rival]
        loss = rates.seconds[number] * max(1 - fear, 1e-9)
        budget = credit * _plain_seconds(state) + max(float(state.costs.seconds[0]), 0)
        return int(np.clip(budget / loss, 1, most_rounds))


def _plain_seconds(state: AutoState) -> float:
    """Seconds of a plain pass."""
    return float(state.costs.plausible(len(state.sizes.widths))[1])


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


def _best(state: AutoState, outlook: Forecast, rows: int, most_rounds: int) -> tuple[int, Rates]:
    """The number of the best limits of drafters that ran, and the rates of all considered.

    One drafter's limit after another is improved, from each drafter by itself and from none on.
    """
    count = len(state.sizes.drafters)
    grids = [_lengths(state.sizes, number) for number in range(count)]
    ran = state.counts.rounds_ran > 0
    current = np.zeros(count, int)
    for turn in range(3):
        arms = [current]
        for number, grid in enumerate(grids):
            for base in (current, np.zeros(count, int)):
                moved = np.repeat(base[None], len(grid), axis=0)
                moved[:, number] = grid
                arms.extend(moved)
        rates = _rates(state, outlook, np.unique(np.array(arms), axis=0), rows, most_rounds)
        allowed = ((rates.arms == 0) | ran).all(axis=1)
        best = int(np.argmax(np.where(allowed, rates.mean, 0)))
        if turn and (rates.arms[best] == current).all():
            break
        current = rates.arms[best]
    return best, rates


def _rates(
    state: AutoState,
    outlook: Forecast,
    arms: Int[np.ndarray, "A drafters"],
    rows: float,
    rounds: int,
) -> Rates:
    """What rounds under each of the limits `arms` are expected to emit and cost.

    Drafters take turns: each drafts in the rows in which no earlier one did.
    """
    widths = np.array(state.sizes.widths)
    reached = np.pad(outlook.reaches, ((0, 0), (0, 1)))
    most = outlook.reaches.shape[1]
    waiting, tokens = np.ones(len(arms)), np.ones(len(arms))
    ran, further, shares = np.zeros((3, *arms.shape))
    narrower = np.ones((len(arms), len(widths)))  # the chance that a pass is no wider
    for number, drafter in enumerate(state.sizes.drafters):
        longest = arms[:, number]
        ran[:, number] = (longest > 0) * (1 - (1 - waiting) ** rows)
        if drafter.stops:
            passes = np.concatenate([[0, 0], np.cumsum(outlook.reaches[number])])
            further[:, number] = ran[:, number] * passes[longest]
        nodes = np.minimum(widths - 1, most)
        wider = reached[number][nodes] * (longest[:, None] > nodes)
        narrower *= 1 - ran[:, [number]] * wider
        shares[:, number] = waiting * (longest > 0) * outlook.drafts[number]
        tokens += shares[:, number] * outlook.tokens[number][longest]
        waiting = waiting - shares[:, number]
    passes = np.diff(narrower, axis=1, prepend=0)
    work = count_work(np.full(len(arms), 1 / rounds), passes, ran, further)
    return Rates(
        arms, rows * tokens, work @ state.costs.plausible(len(widths)), work, rows * shares
    )


def _deviation(
    state: AutoState, outlook: Forecast, rates: Rates, base: int, told: bool = False
) -> Float[np.ndarray, "A"]:
    """How uncertain it is by what factor each rate differs from that of `base`, relative.

    Nodes that are drafted under both limits count for nothing, nor does the machine's speed. With
    `told` that is the part of it that a step under those limits would tell.
    """
    work = rates.work / rates.seconds[:, None]
    difference = work - work[base]
    spread = difference @ state.costs.covariance
    variance = (spread * difference).sum(axis=1)
    if told:
        measured = ((work @ state.costs.covariance) * work).sum(axis=1) + NOISE**2
        variance = (spread * work).sum(axis=1) ** 2 / measured
    tokens = np.zeros(len(rates.arms))
    for number, longest in enumerate(rates.arms.T):
        sums, shared = outlook.tokens_deviation[number], np.minimum(longest, longest[base])
        own = sums[longest] - sums[shared]
        own += (shared == 0) * outlook.drafts_deviation[number] * outlook.tokens[number][longest]
        tokens += rates.shares[:, number] * own
    return np.sqrt(np.maximum(variance, 0) + (tokens / rates.tokens) ** 2)


def _confidence(state: AutoState, longest: tuple[int, ...], rows: int) -> tuple[float, ...]:
    """The least confidence at which one more token pays for its pass and for a wider window.

    A token counts only if those before it are accepted. What a limit changes in acceptance and in
    lengths is learned under it, so there are few `_CONFIDENCES`.
    """
    sizes = state.sizes
    limits = np.zeros(len(longest))
    if not state.costs.known:
        return tuple(limits.tolist())
    outlook = forecast(state.counts)
    pace = float(_rates(state, outlook, np.array([longest]), rows, 1).mean[0])
    seconds = state.costs.plausible(len(sizes.widths))
    slot = max(seconds[2 : len(sizes.widths) + 1].sum(), 0) / max(sizes.widths[-1] - 1, 1)
    further = seconds[-len(longest) :]
    for number, (drafter, length) in enumerate(zip(sizes.drafters, longest, strict=True)):
        if drafter.stops and length > 1:
            reached = (1 + outlook.tokens[number, length - 1]) / length
            least = (further[number] + slot) * pace / (rows**2 * reached)
            limits[number] = max(level for level in _CONFIDENCES if level <= max(least, 0))
    return tuple(limits.tolist())
