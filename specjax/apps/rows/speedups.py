"""Speed-ups over plain decoding from rows of several repeats, with their confidence intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import NamedTuple

from scipy.special import stdtrit

from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.statistics import QUANTILE, figures, possible_speedup, speedup_of

UNRESOLVED = 0.03
"""The relative half-width above which a confidence interval is too wide to be meaningful."""


class Ratio(NamedTuple):
    """A geometric mean of ratios, with its 95 % confidence interval from repeats."""

    mean: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether both ends of the interval are within the factor 1 + `UNRESOLVED` of the mean."""
        widest = 1 + UNRESOLVED
        return self.high <= widest * self.mean and self.mean <= widest * self.low

    def __str__(self) -> str:
        text = f"{self.mean:.3f} [{self.low:.3f}..{self.high:.3f}]"
        return text if self.resolved else f"{text} unresolved"


@dataclass(frozen=True)
class Speedup:
    """The speed of a drafter compared with plain decoding, at a batch size and temperature.

    `acceptance_length` is in tokens per pass of the target, `mean_draft` in draft tokens per pass,
    and `share_drafted` is the fraction of passes with a draft. `speedup` is the ratio of tokens/s
    without prefill, `speedup_with_prefill` with it. `identical` says whether greedy tokens are
    equal, and is None for sampled ones. `predicted` is the speed-up computed from parts of a round
    that are timed alone, among them a draft of `draft_s` seconds; both are None for draft lengths
    that depend on costs. `possible_speedup` is the largest speed-up that the tokens per pass allow,
    None for plain decoding.
    """

    drafter: str
    num_speculative_tokens: int | str
    batch: int
    temperature: float
    acceptance_length: float
    mean_draft: float
    share_drafted: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: Ratio
    speedup_with_prefill: Ratio
    identical: bool | None
    predicted: float | None = None
    draft_s: float | None = None
    possible_speedup: float | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[DecodedRow],
        num_speculative_tokens: int | str,
        batch: int,
        temperature: float,
        predicted: float | None = None,
        draft_s: float | None = None,
    ) -> Speedup:
        """Return the speed-up of one drafter from its rows in all repeats of equal batches."""
        by_batch: dict[int, list[DecodedRow]] = defaultdict(list)
        for row in rows:
            by_batch[row.batch].append(row)
        repeats: dict[tuple[int | str, ...], list[list[DecodedRow]]] = defaultdict(list)
        for of_batch in by_batch.values():
            repeats[tuple(row.question_id for row in of_batch)].append(of_batch)

        def ratio(*, with_prefill: bool = False) -> Ratio:
            return speed_ratio(
                [speedup_of(of_batch, with_prefill=with_prefill) for of_batch in one]
                for one in repeats.values()
            )

        all_figures, same = figures(rows), {row.identical for row in rows}
        possible = [possible_speedup([row] for row in of_batch) for of_batch in by_batch.values()]
        counts, drafts = all_figures.counts, any(row.longest_path for row in rows)
        return cls(
            drafter=rows[0].drafter,
            num_speculative_tokens=num_speculative_tokens,
            batch=batch,
            temperature=temperature,
            acceptance_length=counts.acceptance_length,
            mean_draft=counts.drafted_per_round,
            share_drafted=counts.share_drafted,
            tokens_per_second=all_figures.tokens_per_second,
            plain_tokens_per_second=all_figures.plain_tokens_per_second,
            speedup=ratio(),
            speedup_with_prefill=ratio(with_prefill=True),
            identical=None if None in same else False not in same,
            predicted=predicted,
            draft_s=draft_s,
            # A batch ends with its longest row.
            possible_speedup=math.exp(fmean(map(math.log, possible))) if drafts else None,
        )

    @property
    def efficiency(self) -> float | None:
        """The measured speed-up divided by the predicted one; None without a prediction."""
        return None if self.predicted is None else self.speedup.mean / self.predicted


def speed_ratio(batches: Iterable[Sequence[float]]) -> Ratio:
    """Return the geometric mean over batches of a drafter's speed divided by plain decoding's.

    Each batch is a list of speed-ups, one per repeat, whose spread gives the confidence interval.
    Variances differ between batches, so the degrees of freedom are those of Welch and
    Satterthwaite: at least one batch's repeats less one, at most the sum of that over batches.
    """
    means, errors, weights = [], [], []
    for speedups in batches:
        logs = list(map(math.log, speedups))
        means.append(fmean(logs))
        errors.append(variance(logs) / len(logs) if len(logs) > 1 else math.inf)
        weights.append(errors[-1] ** 2 / max(len(logs) - 1, 1))
    mean, error = fmean(means), math.sqrt(sum(errors)) / len(means)
    if 0 < error < math.inf:
        error *= stdtrit(sum(errors) ** 2 / sum(weights), QUANTILE)
    return Ratio(math.exp(mean), math.exp(mean - error), math.exp(mean + error))


def median_repeat(speeds: Sequence[tuple[float, float]]) -> int:
    """Return the index of the repeat with the median speed-up.

    `speeds` are the tokens/s of a drafter and of plain decoding in each repeat. Of an even number
    of repeats, it is the lower of the two in the middle.
    """
    ratios = [ours / plain for ours, plain in speeds]
    return sorted(range(len(speeds)), key=ratios.__getitem__)[(len(speeds) - 1) // 2]
