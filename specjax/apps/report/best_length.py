"""The fastest draft length of a drafter, as measured and as acceptance and costs imply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specjax.apps.report.runs import Entry, without_length
from specjax.apps.rows.statistics import OVERALL


@dataclass(frozen=True)
class BestLength:
    """The draft lengths of a drafter under the same conditions.

    `best` is the fastest run. `expected` are the expected speed-ups of the lengths 0 to K, the
    longest one measured: the tokens that a round emits, by the acceptance by position of the
    longest drafts, divided by its cost in passes of plain decoding, round_cost + token_cost *
    length, fitted to the seconds of all runs by least squares. For trees, in which more tokens than
    positions are drafted, it is empty. A length of 0 is plain decoding. With the same acceptance at
    all positions this is `theory.speedup(alpha, K, token_cost, verify_cost=round_cost)`.
    """

    label: str
    best: Entry
    expected: tuple[float, ...]
    round_cost: float
    token_cost: float

    @property
    def expected_length(self) -> int | None:
        """The shortest length with the greatest expected speed-up; None for trees."""
        return int(np.argmax(self.expected)) if self.expected else None


def best_lengths(group: Sequence[Entry]) -> dict[str, BestLength]:
    """Return the best draft length of each family of runs that has runs of several lengths.

    A family is the runs whose configs differ only in the draft length. All runs have the same
    conditions. Runs without a speed-up are left out.
    """
    families: dict[str, list[Entry]] = {}
    for entry in group:
        if entry.run.draft_length is not None and entry.figures[OVERALL].speedup is not None:
            families.setdefault(entry.family, []).append(entry)
    return {
        family: _best(members)
        for family, members in families.items()
        if len({entry.run.draft_length for entry in members}) > 1
    }


def _best(members: Sequence[Entry]) -> BestLength:
    """Return the best length of a family of runs."""
    costs = [_round_cost(entry) for entry in members]
    slope, intercept = np.polyfit([entry.run.draft_length for entry in members], costs, 1)
    longest = max(members, key=lambda entry: entry.run.draft_length)
    return BestLength(
        label=without_length(longest.label),
        best=max(members, key=lambda entry: entry.figures[OVERALL].credible_speedup),
        expected=_expected(longest, intercept, slope) if all(map(_is_chain, members)) else (),
        round_cost=float(intercept),
        token_cost=float(slope),
    )


def _expected(longest: Entry, round_cost: float, token_cost: float) -> tuple[float, ...]:
    """Return the expected speed-up of each length from 0 to that of the longest drafts."""
    counts = longest.figures[OVERALL].counts
    accepted = np.array(counts.num_accepted_tokens_per_pos[: longest.run.draft_length])
    # Tokens after the end of an answer were accepted, but not emitted.
    share = counts.tokens_per_round / counts.acceptance_length
    tokens = share * (1 + np.cumsum(accepted) / counts.num_rounds)
    lengths = np.arange(1, len(tokens) + 1)
    return (1.0, *(tokens / (round_cost + token_cost * lengths)).tolist())


def _round_cost(entry: Entry) -> float:
    """Return the mean seconds of a round divided by those of a pass of plain decoding."""
    figures = entry.figures[OVERALL]
    return figures.counts.tokens_per_round / figures.speedup


def _is_chain(entry: Entry) -> bool:
    """Return whether no draft has more tokens than its longest path."""
    length = entry.run.draft_length
    return all(
        row.longest_path == length and max(row.drafted, default=0) <= length
        for row in entry.run.rows
    )
