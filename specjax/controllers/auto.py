"""A controller that learns the limits with the highest expected tokens per second.

From ordinary steps it estimates the seconds of passes and drafts (`cost_estimates.py`) and how
often drafts are accepted (`acceptance_estimates.py`). Each step uses the limits with the highest
expected throughput (`throughput.py`), or tries others that may be better if that fits the budget
for exploration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from specjax.controllers.acceptance_estimates import (
    Acceptance,
    forecast,
    learn_acceptance,
    no_counts,
)
from specjax.controllers.base import Limits, StepRecord, StepSizes
from specjax.controllers.cost_estimates import doubtful, initial_costs, learn_costs
from specjax.controllers.throughput import (
    Estimates,
    Rates,
    arms_of,
    deviations,
    expected_rates,
    highest_rates,
)

_SHORT_TRIAL = 2
"""The length of the first draft of a drafter that needs a pass for each token."""
_FIRST_ROUNDS = (4, 2)
"""The rounds of the first step with drafts, and of the first without, if wide passes are cheap."""
_FIRST_STEPS = 2
"""The number of steps whose overhead trials may cost in addition to `first_credit`."""
_ROUNDS_TO_CONSTANT = 2.0
"""The minimum ratio of the time of a step's rounds to the overhead of the step."""
_CREDIT_OF_KNOWN_COSTS = 0.25
"""The share of `first_credit` that is left for trials if costs were measured before."""
_WORTH_A_TRIAL = 1.01
"""The factor by which limits must beat the best ones, optimistically, to be tried."""
_LITTLE = 0.01
"""The share of a step's time that a trial may always lose."""
_LEAST_CREDIT = 0.5
"""The plain rounds that a step with the best limits may always lose."""
_MOST_HOPE = 10.0
"""The logarithm of the largest factor by which limits are hoped to be better."""
_LEAST_HOPE = 0.7
"""The factor of `optimism` when the credit is spent."""
_DOUBTFUL_ROUNDS = 8
"""The rounds of a drafter that did not pay, after which it is tried again half as often."""
_CONFIDENT_ROUNDS = 24
"""The rounds of a drafter after which a confidence threshold applies to it."""
_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


class Planned(NamedTuple):
    """A step that was chosen: its limits, and the largest number of rounds allowed for it.

    `instead_of` are the limits that a trial is compared with, or None if the step uses the best
    limits.
    """

    longest: tuple[int, ...]
    most_rounds: int
    instead_of: tuple[int, ...] | None = None


class AutoState(NamedTuple):
    """The estimates of `Auto`, and the steps in progress.

    `credit` is the budget for trials, measured in plain rounds; `chosen` is the number of steps
    chosen so far. If `costs_measured`, all widths and drafters have been timed before.
    """

    estimates: Estimates
    counts: Acceptance
    credit: float
    chosen: int = 0
    under_way: tuple[Planned, ...] = ()
    costs_measured: bool = False

    @property
    def tries(self) -> bool:
        """Whether a step that tries other limits may be in progress; the second step counts."""
        second = self.chosen == 2 and not self.costs_measured
        return second or any(step.instead_of for step in self.under_way)


class Compared(NamedTuple):
    """All limits compared with the best ones of those that are `timed`: their drafters have run.

    `best` is the index of the best limits, and `can_pay` marks those that would be faster than
    plain decoding if all drafts were accepted. `ratio` is the quotient of tokens per second,
    `deviation` its relative standard deviation, and `resolved` the part of it that one step would
    resolve; `least` is the minimum number of rounds of a step.
    """

    rates: Rates
    best: int
    ratio: Float[np.ndarray, "A"]
    deviation: Float[np.ndarray, "A"]
    resolved: Float[np.ndarray, "A"]
    timed: Bool[np.ndarray, "A"]
    can_pay: Bool[np.ndarray, "A"]
    least: Float[np.ndarray, "A"]
    most_rounds: int


@dataclass(frozen=True)
class Auto:
    """A controller that chooses the limits expected to emit the most tokens per second.

    Trials of other limits cost at most `first_credit` plain rounds plus a fraction `trial_share` of
    the time. Limits are tried if they would be better than the best with estimates off by
    `optimism` standard deviations. Steps are short while other limits may be better than the best.
    Raises ValueError for a negative number.
    """

    trial_share: float = 0.01
    first_credit: float = 2.0
    optimism: float = 1.0

    def __post_init__(self) -> None:
        for name in ("trial_share", "first_credit", "optimism"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 <= value < float("inf"):
                raise ValueError(f"Auto.{name}={value!r}: use a number of at least 0")

    def init(self, sizes: StepSizes) -> AutoState:
        """Return the initial state, in which only the sizes are known."""
        counts = no_counts(sizes)
        estimates = Estimates(sizes, initial_costs(sizes), forecast(counts))
        return AutoState(estimates, counts, self.first_credit)

    def know_costs(self, state: AutoState, records: Sequence[StepRecord]) -> AutoState:
        """Return the state with the costs of steps that were timed before the first token."""
        sizes, costs, outlook = state.estimates
        costs = doubtful(costs)
        for record in records:
            costs = learn_costs(costs, sizes, record)
        if not costs.known:
            return state
        # No draft of a request has run, so that the first ones are trials.
        costs = costs._replace(rounds=np.zeros_like(costs.rounds))
        return state._replace(
            estimates=Estimates(sizes, costs, outlook),
            credit=_CREDIT_OF_KNOWN_COSTS * self.first_credit,
            costs_measured=True,
        )

    def choose(
        self, state: AutoState, unfinished: int, most_rounds: int
    ) -> tuple[Limits, int, AutoState]:
        """Return the limits and rounds of the next step, and the new state.

        `unfinished` is the number of unfinished rows; the number of rounds is at most
        `most_rounds`.
        """
        sizes, rows = state.estimates.sizes, max(unfinished, 1)
        if not any(drafter.num_nodes for drafter in sizes.drafters):
            none = (0,) * len(sizes.drafters)
            return Limits(none, (0.0,) * len(none)), most_rounds, state
        rates = expected_rates(state.estimates, arms_of(sizes), rows, most_rounds)
        if state.estimates.costs.known:
            arm, base, rounds = self._plan(state, rates, most_rounds)
        else:
            arm, base, rounds = _first_steps(state, most_rounds)
        longest = tuple(rates.arms[arm].tolist())
        instead_of = None if arm == base else tuple(rates.arms[base].tolist())
        limits = Limits(longest, _confidence(state.estimates, rates, arm, rows))
        under_way = (*state.under_way, Planned(longest, most_rounds, instead_of))
        return limits, rounds, state._replace(under_way=under_way, chosen=state.chosen + 1)

    def update(self, state: AutoState, record: StepRecord) -> AutoState:
        """Return the state after a step; the cost of a trial is charged to the budget."""
        longest, rounds = record.limits.longest, record.rounds
        under_way = list(state.under_way)
        planned = Planned(longest, max(rounds, 1))
        while under_way:  # abandoned steps have no record
            planned = under_way.pop(0)
            if planned.longest == longest:
                break
        sizes, costs, _ = state.estimates
        counts = learn_acceptance(state.counts, record)
        estimates = Estimates(sizes, learn_costs(costs, sizes, record), forecast(counts))
        credit = state.credit
        if estimates.costs.known and not costs.known:
            credit += float(_FIRST_STEPS * estimates.costs.seconds[0] / estimates.plain_s)
        if rounds:
            arms = np.array([longest, planned.instead_of or longest, (0,) * len(longest)], int)
            rates = expected_rates(estimates, arms, record.row_rounds / rounds, planned.most_rounds)
            seconds = rates.round_s[0] * rounds + estimates.costs.seconds[0]
            worth = rates.tokens[0] * rounds / rates.mean[1]
            lost = max(seconds - worth, 0) if planned.instead_of else 0
            credit += float((self.trial_share * seconds - lost) / rates.seconds[2])
        return state._replace(
            estimates=estimates, counts=counts, credit=credit, under_way=tuple(under_way)
        )

    def _plan(self, state: AutoState, rates: Rates, most_rounds: int) -> tuple[int, int, int]:
        """Return the indices of the next step's limits and of the best ones, and its rounds."""
        costs = state.estimates.costs
        timed = ((rates.arms == 0) | (costs.rounds > 0)).all(axis=1)
        best = int(np.argmax(np.where(timed, rates.mean, 0)))
        can_pay = np.ones(len(rates.arms), bool)
        if state.costs_measured:
            plain = rates.mean[(rates.arms == 0).all(axis=1)].max()
            highest = highest_rates(state.estimates, rates.arms, rates.tokens[0], most_rounds)
            can_pay = highest > _WORTH_A_TRIAL * plain
        # The overhead of a step should be small beside the time of its rounds.
        least = np.ceil(_ROUNDS_TO_CONSTANT * costs.seconds[0] / rates.round_s)
        compared = Compared(
            rates,
            best,
            rates.mean / rates.mean[best],
            *deviations(state.estimates, rates, best),
            timed,
            can_pay,
            np.clip(least, 1, most_rounds),
            most_rounds,
        )
        trial = None if state.tries else self._trial(state, compared)
        if trial is None:
            return best, best, self._rounds(state, compared)
        return trial[0], best, trial[1]

    def _trial(self, state: AutoState, compared: Compared) -> tuple[int, int] | None:
        """Return the index of limits that are worth a trial, and its rounds, or None."""
        rates, best, ratio, deviation, resolved, timed, can_pay, least, most_rounds = compared
        sizes, costs, _ = state.estimates
        # The larger the budget, the more optimistic the estimates.
        optimism = self.optimism * max(state.credit / max(self.first_credit, 1e-9), _LEAST_HOPE)
        hopes = ratio * np.exp(np.minimum(optimism * resolved, _MOST_HOPE))
        # A short step loses less in its rounds, plus its share of the overhead of a step.
        lost = rates.round_s * (1 - ratio)
        rounds = np.where(timed & (lost * most_rounds < costs.seconds[0]), most_rounds, least)
        loss = lost * rounds + costs.seconds[0] * (1 - rounds / most_rounds)
        credit = state.credit * state.estimates.plain_s
        little = _LITTLE * most_rounds * rates.seconds[best]
        allowed = (loss <= max(credit, little)) & (hopes > _WORTH_A_TRIAL)
        # Drafters that did not pay are tried again in any case: one step may have been misleading.
        woken = (rates.arms > 0) & (rates.arms[best] == 0)
        doubts = _DOUBTFUL_ROUNDS / (woken @ costs.rounds + _DOUBTFUL_ROUNDS)
        allowed |= woken.any(axis=1) & (2 * loss <= credit * doubts)
        allowed &= timed | (rates.arms <= _first_trial(sizes)).all(axis=1)
        allowed &= can_pay
        allowed[best] = False
        if not allowed.any():
            return None
        arm = int(np.argmax(np.where(allowed, hopes, 0)))
        if not timed[arm]:
            return arm, int(rounds[arm])
        # As many rounds as the credit allows if the limits turn out badly.
        share = 1 - float(ratio[arm] * np.exp(-self.optimism * deviation[arm]))
        budget = min(state.credit, self.first_credit) * state.estimates.plain_s
        longer = min(budget / (rates.round_s[arm] * max(share, 1e-9)), most_rounds)
        return arm, max(int(rounds[arm]), int(longer))

    def _rounds(self, state: AutoState, compared: Compared) -> int:
        """Return the number of rounds in which the best limits would lose little to better ones."""
        rates, best, most_rounds = compared.rates, compared.best, compared.most_rounds
        costs, least = state.estimates.costs, int(compared.least[best])
        runs = rates.arms[best] > 0
        if not runs.any() and not state.tries:
            return most_rounds
        hopes = compared.ratio * np.exp(np.minimum(self.optimism * compared.deviation, _MOST_HOPE))
        hopes[~compared.can_pay] = 0
        hopes[best] = 0
        share = max(float(hopes.max()) - 1, 1e-9)
        budget = max(state.credit, _LEAST_CREDIT) * state.estimates.plain_s + costs.seconds[0]
        rounds = int(min(budget / (rates.round_s[best] * share), most_rounds))
        if runs.any():
            rounds = min(rounds, max(int(costs.rounds[runs].max()), 2 * least))
        return max(rounds, least)


def _first_steps(state: AutoState, most_rounds: int) -> tuple[int, int, int]:
    """Return the same as `Auto._plan` for the first two steps, before anything is known.

    One is a plain step, the other has short drafts. If wide passes are cheap (accelerators), all
    drafters draft in the very first step, since each further step would cost time on the host;
    otherwise one drafter does, after a plain step.
    """
    sizes = state.estimates.sizes
    drafts = state.chosen == (0 if sizes.wide_is_cheap else 1)
    rounds = min(_FIRST_ROUNDS[not drafts], most_rounds) if sizes.wide_is_cheap else 1
    if not drafts:
        return 0, 0, rounds
    first = _first_trial(sizes)
    if not sizes.wide_is_cheap:
        first = first * (np.cumsum(first > 0) == 1)
    arms = arms_of(sizes)
    arm = int(np.argmax((arms <= first).all(axis=1) * arms.sum(axis=1)))
    return arm, arm, rounds


def _first_trial(sizes: StepSizes) -> Int[np.ndarray, "drafters"]:
    """Return the limits of a first trial: drafts as wide as the narrowest pass for drafts."""
    width = next((width for width in sizes.widths if width > 1), 1)
    short = width if sizes.wide_is_cheap else _SHORT_TRIAL
    return np.array(
        [
            min(drafter.num_nodes, width - 1, short if drafter.stops else width)
            for drafter in sizes.drafters
        ]
    )


def _confidence(estimates: Estimates, rates: Rates, arm: int, rows: int) -> tuple[float, ...]:
    """Return for each drafter the least confidence at which one more token pays for its cost.

    The cost is that of the token's own pass and of a wider window. A token counts only if those
    before it are accepted, and if several rows draft, the others mostly continue anyway. The effect
    of a threshold on acceptance and lengths is learned only while it applies, so there are few
    `_CONFIDENCES`.
    """
    sizes, costs, outlook = estimates
    longest = rates.arms[arm].tolist()
    limits = [0.0] * len(longest)
    if costs.known and any(longest):
        pace = float(rates.mean[arm])
        slot = costs.seconds[2 : len(sizes.widths) + 1].sum() / (sizes.widths[-1] - 1)
        further = costs.seconds[-len(longest) :]
        for number, (drafter, length) in enumerate(zip(sizes.drafters, longest, strict=True)):
            if drafter.stops and length > 1 and costs.rounds[number] >= _CONFIDENT_ROUNDS:
                reached = (1 + outlook.tokens[number, length - 1]) / length
                least = (further[number] + slot) * pace / (rows**2 * reached)
                limits[number] = max(level for level in _CONFIDENCES if level <= max(least, 0))
    return tuple(limits)
