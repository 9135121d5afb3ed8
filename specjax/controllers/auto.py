"""The controller that learns: limits by expected tokens per second.

It keeps two estimates from ordinary steps: what things cost (`costs.py`) and what drafts bring
(`acceptance.py`). Each step takes the limits with most expected tokens per second (`rates.py`),
unless others might be better, for all that is known, and trying them costs no more than may be
spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specjax.controllers.acceptance import Acceptance, forecast, learn_acceptance, no_counts
from specjax.controllers.base import Limits, StepRecord, StepSizes
from specjax.controllers.costs import initial_costs, learn_costs
from specjax.controllers.rates import Estimates, Rates, deviation, expected_rates

_SHORT_TRIAL = 2
"""Tokens of the first draft of a drafter whose every token costs a pass."""
_FIRST_ROUNDS = 8
"""Rounds of a step of unknown cost where steps have a cost of their own; else one."""
_WORTH_A_TRIAL = 1.01
"""How much better than the best limits others have to be, if all goes well, to be tried."""
_LEAST_CREDIT = 0.5
"""Plain rounds that a step of the best limits may lose in any case."""
_MOST_HOPE = 10.0
"""The logarithm of the most that others are hoped to be better."""
_LEAST_HOPE = 0.7
"""The least factor of `optimism`, where the credit is spent."""
_DOUBTFUL_ROUNDS = 8
"""Rounds of a drafter after which it is tried again half as often, if it did not pay."""
_ALL_LENGTHS = 8
"""Drafters of more nodes are tried with some numbers of them only."""
_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


class Planned(NamedTuple):
    """A step that was chosen: the limits, and those it is tried instead of (None: the best)."""

    longest: tuple[int, ...]
    instead_of: tuple[int, ...] | None = None


class AutoState(NamedTuple):
    """What `Auto` has learned, and the steps that are under way.

    `credit` are the plain rounds that trials may cost.
    """

    estimates: Estimates
    counts: Acceptance
    credit: float
    under_way: tuple[Planned, ...] = ()

    @property
    def tries(self) -> tuple[int, ...] | None:
        """The limits of a trial that is under way."""
        return next((step.longest for step in self.under_way if step.instead_of), None)


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
        counts = no_counts(sizes)
        estimates = Estimates(sizes, initial_costs(sizes), forecast(counts))
        return AutoState(estimates, counts, self.first_credit)

    def choose(
        self, state: AutoState, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, AutoState]:
        """The next step's limits and rounds."""
        rows = max(unfinished, 1)
        planned, rounds = self._plan(state, rows, most_rounds)
        limits = Limits(planned.longest, _confidence(state.estimates, planned.longest, rows))
        return limits, rounds, state._replace(under_way=(*state.under_way, planned))

    def update(self, state: AutoState, record: StepRecord) -> AutoState:
        """The state after a step, whose cost is charged if it was a trial."""
        longest, rounds = record.limits.longest, record.rounds
        under_way = list(state.under_way)
        planned = Planned(longest)
        while under_way:  # steps that were given up are not reported
            planned = under_way.pop(0)
            if planned.longest == longest:
                break
        sizes, costs, _ = state.estimates
        counts = learn_acceptance(state.counts, record)
        estimates = Estimates(sizes, learn_costs(costs, sizes, record), forecast(counts))
        credit = state.credit
        if rounds:
            arms = np.array([longest, planned.instead_of or longest, (0,) * len(longest)], int)
            rates = expected_rates(estimates, arms, record.row_rounds / rounds, rounds)
            plain_rounds = float(rounds * rates.seconds[0] / rates.seconds[2])
            lost = max(1 - float(rates.mean[0] / rates.mean[1]), 0)
            credit += (self.trial_share - lost) * plain_rounds
        return AutoState(estimates, counts, credit, tuple(under_way))

    def _plan(self, state: AutoState, rows: int, most_rounds: int) -> tuple[Planned, int]:
        """What to do next, and for how many rounds."""
        sizes, costs, _ = state.estimates
        none = (0,) * len(sizes.drafters)
        first_rounds = min(_FIRST_ROUNDS, most_rounds) if sizes.dispatch_s else 1
        if not any(one.num_nodes for one in sizes.drafters):
            return Planned(none), most_rounds
        if not costs.known:
            # Plain steps tell what a pass costs; one that drafts is tried beside the first of them.
            number = next(number for number, one in enumerate(sizes.drafters) if one.num_nodes)
            trial = (*none[:number], _first_trial(sizes)[number], *none[number + 1 :])
            tried = state.tries is not None or state.counts.asked.any()
            first = Planned(none) if tried or not state.under_way else Planned(trial, none)
            return first, first_rounds
        rates, best = _best(state.estimates, rows, most_rounds)
        best_limits = tuple(rates.arms[best].tolist())
        trial = self._trial(state, rates, best)
        if trial is None:
            unknown = state.tries and (costs.rounds[np.array(state.tries) > 0] == 0).any()
            most_rounds = first_rounds if unknown else most_rounds
            return Planned(best_limits), self._rounds(state, rates, best, most_rounds)
        rounds = self._rounds(state, rates, trial, most_rounds, best)
        if (costs.rounds[rates.arms[trial] > 0] == 0).any():
            rounds = first_rounds
        return Planned(tuple(rates.arms[trial].tolist()), best_limits), rounds

    def _trial(self, state: AutoState, rates: Rates, best: int) -> int | None:
        """The limits that are worth a trial, if any, by number."""
        if state.tries is not None:
            return None
        sizes, costs, _ = state.estimates
        # The more may be spent, the more is hoped for.
        optimism = self.optimism * max(state.credit / self.first_credit, _LEAST_HOPE)
        told = deviation(state.estimates, rates, best, told=True)
        hopes = rates.mean * np.exp(np.minimum(optimism * told, _MOST_HOPE))
        loss = rates.seconds * (1 - rates.mean / rates.mean[best])
        credit = state.credit * state.estimates.plain_s
        allowed = (loss <= credit) & (hopes > rates.mean[best] * _WORTH_A_TRIAL)
        # Drafters that did not pay are tried again in any case: one step may have been misleading.
        woken = (rates.arms > 0) & (rates.arms[best] == 0)
        doubts = _DOUBTFUL_ROUNDS / (woken @ costs.rounds + _DOUBTFUL_ROUNDS)
        allowed |= woken.any(axis=1) & (2 * loss <= credit * doubts)
        short = rates.arms <= np.array(_first_trial(sizes))
        allowed &= ((costs.rounds > 0) | short).all(axis=1)
        allowed[best] = False
        return int(np.argmax(np.where(allowed, hopes, 0))) if allowed.any() else None

    def _rounds(
        self,
        state: AutoState,
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
        fear = self.optimism * deviation(state.estimates, rates, rival)[number]
        share = 1 - rates.mean[number] * np.exp(-fear) / rates.mean[rival]
        budget = credit * state.estimates.plain_s + state.estimates.costs.seconds[0]
        return int(np.clip(budget / (rates.seconds[number] * max(share, 1e-9)), 1, most_rounds))


def _first_trial(sizes: StepSizes) -> tuple[int, ...]:
    """Short drafts: as wide as the narrowest pass for drafts."""
    width = next((width for width in sizes.widths if width > 1), 1)
    return tuple(
        min(one.num_nodes, width - 1, _SHORT_TRIAL if one.stops else width)
        for one in sizes.drafters
    )


def _lengths(sizes: StepSizes, most: int) -> list[int]:
    """The limits that are considered for a drafter of `most` nodes: all, or some of them."""
    if most <= _ALL_LENGTHS:
        return list(range(most + 1))
    powers = {2**power for power in range(most.bit_length())}
    return sorted({0, most} | powers | {width - 1 for width in sizes.widths if width <= most})


def _best(estimates: Estimates, rows: int, most_rounds: int) -> tuple[Rates, int]:
    """The rates of all limits considered, and the number of the best of drafters that were timed.

    One drafter's limit after another is improved, from each drafter by itself and from none on.
    """
    sizes, costs, _ = estimates
    grids = [_lengths(sizes, one.num_nodes) for one in sizes.drafters]
    current = none = np.zeros(len(grids), int)
    for _ in range(3):
        arms = np.concatenate([_neighbours(base, grids) for base in (current, none)])
        rates = expected_rates(estimates, arms, rows, most_rounds)
        allowed = ((arms == 0) | (costs.rounds > 0)).all(axis=1)
        best = int(np.argmax(np.where(allowed, rates.mean, 0)))
        if (arms[best] == current).all():
            break
        current = arms[best]
    return rates, best


def _neighbours(
    base: Int[np.ndarray, "drafters"], grids: list[list[int]]
) -> Int[np.ndarray, "A drafters"]:
    """Limits that differ from `base` in those of one drafter."""
    arms = np.repeat(base[None], sum(map(len, grids)), axis=0)
    arms[np.arange(len(arms)), np.repeat(np.arange(len(grids)), list(map(len, grids)))] = [
        length for grid in grids for length in grid
    ]
    return arms


def _confidence(estimates: Estimates, longest: tuple[int, ...], rows: int) -> tuple[float, ...]:
    """The least confidence at which one more token pays for its pass and for a wider window.

    A token counts only if those before it are accepted, and where several rows draft, the others
    mostly continue anyway. What a limit changes in acceptance and in lengths is learned under it,
    so there are few `_CONFIDENCES`.
    """
    sizes, costs, outlook = estimates
    limits = [0.0] * len(longest)
    if not costs.known or not any(longest):
        return tuple(limits)
    pace = float(expected_rates(estimates, np.array([longest]), rows, 1).mean[0])
    slot = costs.seconds[2 : len(sizes.widths) + 1].sum() / (sizes.widths[-1] - 1)
    further = costs.seconds[-len(longest) :]
    for number, (drafter, length) in enumerate(zip(sizes.drafters, longest, strict=True)):
        if drafter.stops and length > 1:
            reached = (1 + outlook.tokens[number, length - 1]) / length
            least = (further[number] + slot) * pace / (rows**2 * reached)
            limits[number] = max(level for level in _CONFIDENCES if level <= max(least, 0))
    return tuple(limits)
