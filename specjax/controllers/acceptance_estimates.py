"""Estimates of how often drafters draft, how far, and how often each node is accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.controllers.base import StepRecord, StepSizes

_MEMORY = 400.0
"""The number of row rounds (rounds times rows) after which a count has decayed to 1/e."""
_FIRST_NODE = 0.55
"""The assumed acceptance probability of a draft's first node, before any data.

That of node n (from 0) is 1/(n+1) of it, which lies between chains and trees.
"""
_DRAFTS = 0.7
"""The assumed probability that a drafter drafts when it is its turn, before any data."""
_WEIGHT = 4.0
"""The weight of these assumptions, as a number of row rounds."""


class Acceptance(NamedTuple):
    """Exponentially decayed counts by drafter and node.

    A row round is one round of one row. `asked` counts the row rounds in which no earlier drafter
    drafted, `turns` those in which this drafter did. For each node, `open_turns` counts the turns
    whose limit allowed the node, `accepted` those in which it was accepted, `open_rounds` the
    rounds in which the drafter ran with such a limit, and `drafted` those in which some row drafted
    the node.
    """

    asked: Float[np.ndarray, "drafters"]
    turns: Float[np.ndarray, "drafters"]
    open_turns: Float[np.ndarray, "drafters N"]
    accepted: Float[np.ndarray, "drafters N"]
    open_rounds: Float[np.ndarray, "drafters N"]
    drafted: Float[np.ndarray, "drafters N"]


class Forecast(NamedTuple):
    """The expected behavior of each drafter when it runs, with standard deviations.

    `drafts` is the probability that a drafter drafts when it is its turn. `tokens[:, k]` is the
    expected number of tokens that it adds under limit k. `reaches[:, n]` is the probability that
    some row drafts node n (0 for n = N), and `passes[:, k]` the expected number of passes after the
    first under limit k, for drafters that draft token by token.
    """

    drafts: Float[np.ndarray, "drafters"]
    drafts_deviation: Float[np.ndarray, "drafters"]
    tokens: Float[np.ndarray, "drafters N+1"]
    tokens_deviation: Float[np.ndarray, "drafters N+1"]
    reaches: Float[np.ndarray, "drafters N+1"]
    passes: Float[np.ndarray, "drafters N+1"]


def no_counts(sizes: StepSizes) -> Acceptance:
    """Return the counts before the first step, all 0."""
    count = len(sizes.drafters)
    by_drafter = np.zeros(count)
    most_nodes = max((drafter.num_nodes for drafter in sizes.drafters), default=0)
    by_node = np.zeros((count, most_nodes))
    return Acceptance(by_drafter, by_drafter, by_node, by_node, by_node, by_node)


def learn_acceptance(counts: Acceptance, record: StepRecord) -> Acceptance:
    """Return the counts updated with a step's record; older counts decay."""
    longest = np.array(record.limits.longest, int)
    opened = np.arange(counts.accepted.shape[1])[None, :] < longest[:, None]
    earlier = np.cumsum(record.turns) - record.turns
    new = Acceptance(
        asked=(record.row_rounds - earlier) * (longest > 0),
        turns=record.turns * (longest > 0),
        open_turns=record.turns[:, None] * opened,
        accepted=record.accepted * opened,
        open_rounds=record.ran[:, None] * opened,
        drafted=record.drafted * opened,
    )
    kept = np.exp(-record.row_rounds / _MEMORY)
    return Acceptance(*(kept * old + more for old, more in zip(counts, new, strict=True)))


def forecast(counts: Acceptance) -> Forecast:
    """Return what the counts predict of each drafter; where they are few, a prior dominates."""
    drafts = (counts.turns + _WEIGHT * _DRAFTS) / (counts.asked + _WEIGHT)
    drafts_deviation = np.sqrt(drafts * (1 - drafts) / (counts.asked + _WEIGHT))
    weights = 1 / np.arange(1, counts.accepted.shape[1] + 1)
    # One factor says how much better or worse than the prior a drafter is; early nodes say most.
    expected = _FIRST_NODE * (counts.open_turns * weights) @ weights
    factor = (counts.accepted @ weights + _WEIGHT) / (expected + _WEIGHT)
    prior = np.minimum(factor[:, None] * _FIRST_NODE * weights, 0.95)
    evidence = counts.open_turns + _WEIGHT
    chance = (counts.accepted + _WEIGHT * prior) / evidence
    deviation = np.sqrt(chance * (1 - chance) / evidence)
    reaches = (counts.drafted + _WEIGHT) / (counts.open_rounds + _WEIGHT)
    none = np.zeros((len(drafts), 1))
    # A pass follows each token but the last that the limit allows.
    passes = np.concatenate([none, none, np.cumsum(reaches[:, :-1], axis=1)], axis=1)
    return Forecast(
        drafts,
        drafts_deviation,
        np.concatenate([none, np.cumsum(chance, axis=1)], axis=1),
        np.concatenate([none, np.cumsum(deviation, axis=1)], axis=1),
        np.concatenate([reaches, none], axis=1),
        passes[:, : reaches.shape[1] + 1],
    )
