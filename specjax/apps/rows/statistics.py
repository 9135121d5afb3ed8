"""The figures of a run by task: acceptance (`specjax.metrics`) and speeds.

A speed is new tokens divided by seconds of decoding, with each batch's seconds counted once. The
speed-up is the drafter's speed divided by plain decoding's, both over the batches decoded both
ways. A task's speeds cover batches of this task only, since tasks in one batch share its seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.special import stdtrit

from specjax import metrics
from specjax.apps.rows.records import DecodedRow, Run
from specjax.core.none import PLAIN_DECODING
from specjax.engine.statistics import Statistics

OVERALL = "overall"
FEW = 5
"""The number of answers below which figures are marked as uncertain."""
QUANTILE = 0.975
"""The quantile of Student's t at the upper end of a 95 % interval."""
TASKS = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Summ",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "code": "Code",
}
"""The headings of Spec-Bench's tasks, in its order; other tasks follow by name."""


@dataclass(frozen=True)
class Figures:
    """The figures of one task, or of all tasks; None if undefined.

    `acceptance_length_interval` is the 95 % confidence interval of the pooled acceptance length
    from the variation between answers, None with fewer than two. `speedup` is pooled, and
    `speedup_interval` is its interval from the variation between batches. `possible_speedup` is
    the largest one that the counts allow: the tokens per pass or, if rows shared batches, those of
    the row with most. `repeats` is how often each batch was decoded, 0 if that differs or is not
    recorded; `speedup_range` has the smallest and the largest speed-up of repeats, and
    `plain_range` those of plain decoding's tokens/s in the batch where it varies most; both are
    None without repeats.
    `plain_passes_per_second` are plain decoding's passes per second of decoding.
    `speedup_with_prefill` includes the seconds of prefill, and `speedup_per_request` is the mean
    over requests, which is defined for batch size 1 only. `timed_requests` is the number of
    requests that the speeds cover. `acceptance_of_tested` is accepted divided by tested draft
    tokens (the accepted ones and the first rejected one).
    """

    counts: metrics.Summary
    acceptance_length_interval: tuple[float, float] | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    plain_passes_per_second: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    possible_speedup: float | None
    repeats: int
    speedup_range: tuple[float, float] | None
    plain_range: tuple[float, float] | None
    speedup_with_prefill: float | None
    speedup_per_request: float | None
    prefill_s: float
    plain_prefill_s: float | None
    acceptance_of_tested: float | None
    timed_requests: int
    identical_rows: int | None
    compared_rows: int

    @property
    def few(self) -> bool:
        """Whether there are too few answers to draw conclusions about other prompts."""
        return self.counts.num_requests < FEW

    @property
    def noisy(self) -> bool:
        """Whether the measured speed-up exceeds the possible one, since the clock is noisy."""
        return noise_remark(self.speedup, self.possible_speedup) is not None

    @property
    def credible_speedup(self) -> float | None:
        """The measured speed-up, or the possible one if that is smaller."""
        return self.possible_speedup if self.noisy else self.speedup

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name as JSON types, those of `counts` included."""
        others = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if name != "counts"
        }
        return {**self.counts.to_dict(), **others}


def figures(rows: Sequence[DecodedRow], timed: Sequence[DecodedRow] | None = None) -> Figures:
    """Return the figures of some rows; their speeds cover only the rows in `timed`, if given."""
    timed = rows if timed is None else timed
    compared = [row.identical for row in rows if row.identical is not None]
    both = [row for row in timed if row.plain_new_tokens is not None]
    alone = len({row.batch for row in both}) == len(both)
    each = [speedup for row in both if (speedup := speedup_of([row])) is not None]
    repeats, speedup_range, plain_range = _ranges_of_repeats(both)
    return Figures(
        counts=summarize(rows),
        acceptance_length_interval=_acceptance_interval(rows),
        tokens_per_second=_speed(_new_tokens(timed), _seconds(timed, "decode_s")),
        plain_tokens_per_second=_speed(_plain_tokens(both), _seconds(both, "plain_decode_s")),
        plain_passes_per_second=_plain_passes_per_second(timed),
        speedup=speedup_of(both),
        speedup_interval=_speedup_interval(both),
        possible_speedup=possible_speedup([[*both]] if alone else [[row] for row in both]),
        repeats=repeats,
        speedup_range=speedup_range,
        plain_range=plain_range,
        speedup_with_prefill=speedup_of(both, with_prefill=True),
        speedup_per_request=fmean(each) if alone and each else None,
        prefill_s=_seconds(timed, "prefill_s"),
        plain_prefill_s=_seconds(both, "plain_prefill_s") if both else None,
        acceptance_of_tested=_acceptance_of_tested(rows),
        timed_requests=len(timed),
        identical_rows=sum(compared) if compared else None,
        compared_rows=len(compared),
    )


def figures_by_task(run: Run) -> dict[str, Figures]:
    """Return the figures of each task and, under `OVERALL`, of all of them."""
    tasks_of_batch: dict[int, set[str]] = {}
    for row in run.rows:
        tasks_of_batch.setdefault(row.batch, set()).add(row.task)
    by_task = {OVERALL: figures(run.rows)}
    for task in tasks_of([run]):
        rows = [row for row in run.rows if row.task == task]
        by_task[task] = figures(rows, [row for row in rows if len(tasks_of_batch[row.batch]) == 1])
    return by_task


def tasks_of(runs: Iterable[Run]) -> list[str]:
    """Return the tasks of some runs, in Spec-Bench's order."""
    tasks = {row.task for run in runs for row in run.rows}
    return [task for task in TASKS if task in tasks] + sorted(tasks - TASKS.keys())


def heading(task: str) -> str:
    """Return a task's name as it appears at the head of a column."""
    return TASKS.get(task, task.replace("_", " ").capitalize())


def noise_remark(speedup: float | None, possible: float | None) -> str | None:
    """Return a remark if a measured speed-up exceeds the possible one as printed, else None.

    Both may be None if they are not known. A round costs at least a pass of plain decoding, so that
    decoding cannot be faster by more than the tokens per pass.
    """
    if speedup is None or possible is None or round(speedup, 2) <= round(possible, 2):
        return None
    return f"the clock is noisy: at most {possible:.2f}x is possible"


def summarize(rows: Sequence[DecodedRow]) -> metrics.Summary:
    """Return the acceptance metrics of some rows, as defined in `specjax.metrics`."""
    counts = (_table(rows, name) for name in ("drafted", "accepted", "emitted", "width"))
    paths = [row.longest_path for row in rows if row.longest_path is not None]
    return metrics.summarize(*counts, max(paths, default=None))


def batch_widths(rows: Sequence[DecodedRow]) -> np.ndarray:
    """Return the width of each pass of the target [R], which all rows of a batch share."""
    passes: dict[tuple[int, int], int] = {}
    for row in rows:
        for number, width in enumerate(row.width, start=row.first_round):
            key = (row.batch, number)
            passes[key] = max(passes.get(key, 0), width)
    return np.array(list(passes.values()), np.int64)


def _table(rows: Sequence[DecodedRow], name: str) -> np.ndarray:
    """Return the counts `name` of all rows as an array [B, R], padded with -1."""
    counts = [getattr(row, name) for row in rows]
    table = np.full((len(rows), max(map(len, counts), default=0)), -1, np.int64)
    for index, values in enumerate(counts):
        table[index, : len(values)] = values
    return table


def possible_speedup(groups: Iterable[Sequence[DecodedRow]]) -> float | None:
    """Return the largest acceptance length of a group of rows, or None without passes."""
    accepted = [[count for row in rows for count in row.accepted] for rows in groups]
    return max((1 + fmean(counts) for counts in accepted if counts), default=None)


def _new_tokens(rows: Iterable[DecodedRow]) -> int:
    return sum(row.new_tokens for row in rows)


def _plain_tokens(rows: Iterable[DecodedRow]) -> int:
    return sum(row.plain_new_tokens for row in rows)


def _plain_passes_per_second(rows: Sequence[DecodedRow]) -> float | None:
    """Return the passes per second of plain decoding; None if it was not run or they are unknown.

    If rows were decoded plainly and with nothing to compare, their own passes count.
    """
    passes = {row.batch: row.plain_passes for row in rows if row.plain_passes is not None}
    if passes:
        known = [row for row in rows if row.plain_passes is not None]
        return _speed(sum(passes.values()), _seconds(known, "plain_decode_s"))
    if all(row.drafter == PLAIN_DECODING and row.plain_new_tokens is None for row in rows):
        return _speed(len(batch_widths(rows)), _seconds(rows, "decode_s"))
    return None


def _seconds(rows: Iterable[DecodedRow], name: str) -> float:
    """Return the sum of the field `name` over the batches of some rows.

    Rows of a batch share its seconds, which count once.
    """
    return sum({row.batch: getattr(row, name) for row in rows}.values())


def _speed(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds else None


def speedup_of(rows: Sequence[DecodedRow], *, with_prefill: bool = False) -> float | None:
    """Return the drafter's speed divided by plain decoding's, for rows decoded both ways."""
    ours_s, plain_s = _seconds(rows, "decode_s"), _seconds(rows, "plain_decode_s")
    if with_prefill:
        ours_s += _seconds(rows, "prefill_s")
        plain_s += _seconds(rows, "plain_prefill_s")
    ours, plain = _speed(_new_tokens(rows), ours_s), _speed(_plain_tokens(rows), plain_s)
    return ours / plain if ours is not None and plain else None


def _speedup_interval(rows: Sequence[DecodedRow]) -> tuple[float, float] | None:
    """Return the 95 % interval of `speedup_of`, by a jackknife of its logarithm over batches.

    The result is None for fewer than two batches, or if all but one of them are empty.
    """
    batches: dict[int, np.ndarray] = {}
    for row in rows:
        counts = batches.setdefault(row.batch, np.zeros(4))
        counts[:2] += row.new_tokens, row.plain_new_tokens
        counts[2:] = row.plain_decode_s, row.decode_s
    if len(batches) < 2:
        return None
    each = np.array(list(batches.values()))
    sums = each.sum(axis=0) - each
    if not (sums > 0).all():
        return None
    return _jackknife(speedup_of(rows), np.log(sums) @ (1, -1, 1, -1))


def _acceptance_interval(rows: Sequence[DecodedRow]) -> tuple[float, float] | None:
    """Return the 95 % interval of the acceptance length, by a jackknife over answers."""
    each = np.array([(sum(row.accepted), len(row.accepted)) for row in rows])
    others = each.sum(axis=0) - each
    if len(each) < 2 or not others[:, 1].all():
        return None
    accepted, rounds = each.sum(axis=0)
    return _jackknife(1 + accepted / rounds, np.log(1 + others[:, 0] / others[:, 1]))


def _jackknife(value: float, without: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of `value` by the jackknife on its logarithm.

    `without` are the logarithms of the value computed without each part in turn.
    """
    count = len(without)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    error *= stdtrit(count - 1, QUANTILE)
    return float(value * np.exp(-error)), float(value * np.exp(error))


def _ranges_of_repeats(
    rows: Sequence[DecodedRow],
) -> tuple[int, tuple[float, float] | None, tuple[float, float] | None]:
    """Return the number of repeats, and the ranges of the speed-up and of plain decoding's speed.

    A repeat's speed-up is the geometric mean over batches. For plain decoding the range is that of
    the batch whose tokens/s vary most. Without repeats, and if batches were not decoded equally
    often, the number is 0 and both ranges are None.
    """
    speeds = list({row.batch: row.repeated_speeds for row in rows}.values())
    counts = {len(batch) for batch in speeds}
    if len(counts) != 1 or 0 in counts:
        return 0, None, None
    ours, plain = np.moveaxis(np.array(speeds), -1, 0)  # [batches, repeats] each
    speedups = np.exp(np.log(ours / plain).mean(axis=0))
    varies = plain[np.argmax(plain.max(axis=1) / plain.min(axis=1))]
    return (
        len(speedups),
        (float(speedups.min()), float(speedups.max())),
        (float(varies.min()), float(varies.max())),
    )


def _acceptance_of_tested(rows: Sequence[DecodedRow]) -> float | None:
    """Return the accepted divided by the tested draft tokens, or None if none was tested."""
    accepted = sum(sum(row.accepted) for row in rows)
    tested = sum(
        min(accepted_tokens + 1, drafted_tokens)
        for row in rows
        for accepted_tokens, drafted_tokens in zip(row.accepted, row.drafted, strict=True)
    )
    return accepted / tested if tested else None


def engine_summary(statistics: Statistics) -> dict[str, Any]:
    """Return an engine's totals by name, with percentiles of waiting and first-token seconds."""
    summary = asdict(statistics.summary())
    for name in ("waiting", "first_token", "between_tokens", "total"):
        percentiles = summary.pop(name)
        summary[f"{name}_s"] = dict(zip(("p50", "p95", "p99"), percentiles, strict=True))
    return {"num_slots": statistics.num_slots, "lossy": statistics.lossy, **summary}
