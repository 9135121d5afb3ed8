"""What drafts bring: how often drafters draft, how far, and how often each node is accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.controllers.base import StepRecord, StepSizes

_MEMORY = 400.0
"""Row rounds after which a count weighs 1/e."""
_FIRST_NODE = 0.55
"""The chance of a first node that nothing is known of; that of node n is taken to be 1/(n+1) of
it, which lies between chains and trees."""
_WEIGHT = 4.0
"""Row rounds that these count as."""
_DRAFTS = 0.7
"""The chance that a drafter drafts when it has its turn, likewise."""


class Acceptance(NamedTuple):
    """Counts with forgetting, by drafter and node.

    `asked` are the row rounds in which no earlier drafter drafted, `turns` those in which it did.
    Of each node: `open_turns` are the turns whose limit let it be drafted, `accepted` those in
    which it was, `open_rounds` the rounds in which the drafter ran with such a limit, `drafted`
    those in which some row drafted it. `rounds_ran` are rounds, never forgotten.
    """

    asked: Float[np.ndarray, "drafters"]
    turns: Float[np.ndarray, "drafters"]
    open_turns: Float[np.ndarray, "drafters N"]
    accepted: Float[np.ndarray, "drafters N"]
    open_rounds: Float[np.ndarray, "drafters N"]
    drafted: Float[np.ndarray, "drafters N"]
    rounds_ran: Float[np.ndarray, "drafters"]


class Forecast(NamedTuple):
    """What to expect of drafters that run: means and standard deviations.

    `drafts` is the chance that a drafter drafts when it has its turn, `tokens[:, k]` what it then
    adds under limit k, and `reaches[:, n]` the chance that node n is drafted in some row.
    """

    drafts: Float[np.ndarray, "drafters"]
    drafts_deviation: Float[np.ndarray, "drafters"]
    tokens: Float[np.ndarray, "drafters N+1"]
    tokens_deviation: Float[np.ndarray, "drafters N+1"]
    reaches: Float[np.ndarray, "drafters N"]


def no_counts(sizes: StepSizes) -> Acceptance:
    """The counts before the first step."""
    count = len(sizes.drafters)
    by_drafter = np.zeros(count)
    by_node = np.zeros((count, max((one.num_nodes for one in sizes.drafters), default=0)))
    return Acceptance(by_drafter, by_drafter, by_node, by_node, by_node, by_node, by_drafter)


def learn_acceptance(counts: Acceptance, record: StepRecord) -> Acceptance:
    """The counts after a step."""
    longest = np.array(record.limits.longest)
    runs = longest > 0
    opened = np.arange(counts.accepted.shape[1])[None, :] < longest[:, None]
    earlier = np.cumsum(record.turns) - record.turns
    new = Acceptance(
        asked=(record.row_rounds - earlier) * runs,
        turns=record.turns * runs,
        open_turns=record.turns[:, None] * opened,
        accepted=record.accepted * opened,
        open_rounds=record.ran[:, None] * opened,
        drafted=record.drafted * opened,
        rounds_ran=record.ran,
    )
    kept = np.exp(-record.row_rounds / _MEMORY)
    sums = [kept * old + more for old, more in zip(counts, new, strict=True)]
    return Acceptance(*sums)._replace(rounds_ran=counts.rounds_ran + record.ran)


def forecast(counts: Acceptance) -> Forecast:
    """What the counts say, and what is taken to be so where they say little."""
    drafts = (counts.turns + _WEIGHT * _DRAFTS) / (counts.asked + _WEIGHT)
    drafts_variance = drafts * (1 - drafts) / (counts.asked + _WEIGHT)
    weights = 1 / np.arange(1, counts.accepted.shape[1] + 1)
    shape = _FIRST_NODE * weights
    # One factor says how much better or worse than that a drafter is; early nodes say most.
    expected, accepted = (counts.open_turns * shape) @ weights, counts.accepted @ weights
    factor = ((accepted + _WEIGHT) / (expected + _WEIGHT))[:, None]
    prior = np.minimum(factor * shape, 0.95)
    evidence = counts.open_turns + _WEIGHT
    chance = (counts.accepted + _WEIGHT * prior) / evidence
    deviation = np.sqrt(chance * (1 - chance) / evidence)
    reaches = (counts.drafted + _WEIGHT) / (counts.open_rounds + _WEIGHT)
    return Forecast(drafts, np.sqrt(drafts_variance), _sums(chance), _sums(deviation), reaches)


def _sums(by_node: Float[np.ndarray, "drafters N"]) -> Float[np.ndarray, "drafters N+1"]:
    """Sums over the first 0, 1, ..., N nodes."""
    return np.pad(np.cumsum(by_node, axis=1), ((0, 0), (1, 0)))
