"""Statistics of a run by task: acceptance (`specjax.metrics`), and speeds.

A speed is new tokens over seconds of decoding, a batch's seconds counted once. The speed-up is the
drafter's speed over plain decoding's, both over the batches that were decoded both ways. A task's
speeds are over the batches that hold only this task, as tasks in one batch share its seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from specjax import metrics
from specjax.fields import dotted
from specjax.reporting.runs import Conditions, Row, Run, Timing, summarize

OVERALL = "overall"
TASKS = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Summ",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "code": "Code",
}
"""Spec-Bench's tasks in its order, with the headings of its columns; others follow by name."""


@dataclass(frozen=True)
class Figures:
    """The figures of one task, or of all; None where undefined.

    `speedup` is pooled, `speedup_with_prefill` counts the seconds of prefill on both sides, and
    `speedup_per_request` is the mean of each request's own, which only a batch size of 1 has.
    `timed_requests` are those that the speeds are over.
    """

    counts: metrics.Summary
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speedup: float | None
    speedup_with_prefill: float | None
    speedup_per_request: float | None
    timed_requests: int
    identical_rows: int | None
    compared_rows: int


@dataclass(frozen=True)
class Entry:
    """A line of the leaderboard; `predicted` is the speed-up computed from measured parts."""

    label: str
    run: Run
    figures: Mapping[str, Figures]
    predicted: float | None = None

    @classmethod
    def of(cls, run: Run, label: str, predicted: float | None = None) -> Entry:
        """The entry of a run."""
        return cls(label, run, figures_by_task(run), predicted)

    @property
    def family(self) -> str:
        """A label that is the same for runs that differ only in K."""
        apart = ("num_speculative_tokens", "report", "compare")
        fields = dotted(self.run.config)
        return repr([(name, value) for name, value in fields.items() if name not in apart])

    @property
    def efficiency(self) -> float | None:
        """Measured over predicted speed-up."""
        measured = self.figures[OVERALL].speedup
        return measured / self.predicted if measured and self.predicted else None


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries by family, in the order given, and by K within one."""
    families = list(dict.fromkeys(entry.family for entry in entries))
    order = {family: index for index, family in enumerate(families)}
    return sorted(entries, key=lambda one: (order[one.family], one.run.draft_length or 0))


def by_conditions(entries: Iterable[Entry]) -> dict[Conditions, list[Entry]]:
    """The entries grouped by conditions, within which speeds may be compared; sorted."""
    groups: dict[Conditions, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.run.conditions, []).append(entry)
    return dict(sorted(groups.items()))


def tasks_of(runs: Iterable[Run]) -> list[str]:
    """The tasks of some runs, in Spec-Bench's order."""
    found = {row.task for run in runs for row in run.rows}
    return [task for task in TASKS if task in found] + sorted(found - TASKS.keys())


def heading(task: str) -> str:
    """The heading of a task's column."""
    return TASKS.get(task, task.replace("_", " ").capitalize())


def figures_by_task(run: Run) -> dict[str, Figures]:
    """The figures of each task and, under `OVERALL`, of all of them."""
    tasks_of_batch: dict[int, set[str]] = {}
    for row in run.rows:
        tasks_of_batch.setdefault(row.batch, set()).add(row.task)
    found = {OVERALL: _figures(run.rows, run.rows, run.longest_path)}
    for task in tasks_of([run]):
        rows = [row for row in run.rows if row.task == task]
        timed = [row for row in rows if len(tasks_of_batch[row.batch]) == 1]
        found[task] = _figures(rows, timed, run.longest_path)
    return found


def _figures(rows: Sequence[Row], timed: Sequence[Row], positions: int | None) -> Figures:
    both = [row for row in timed if row.plain is not None]
    identical = [row.identical for row in rows if row.identical is not None]
    plain = _speed(both, _plain, _decode)
    alone = len({row.batch for row in both}) == len(both)
    each = [_ratio(_speed([row], _ours, _decode), _speed([row], _plain, _decode)) for row in both]
    defined = [value for value in each if value is not None]
    return Figures(
        counts=summarize(rows, positions),
        tokens_per_second=_speed(timed, _ours, _decode),
        plain_tokens_per_second=plain,
        speedup=_ratio(_speed(both, _ours, _decode), plain),
        speedup_with_prefill=_ratio(_speed(both, _ours, _all), _speed(both, _plain, _all)),
        speedup_per_request=fmean(defined) if alone and defined else None,
        timed_requests=len(timed),
        identical_rows=sum(identical) if identical else None,
        compared_rows=len(identical),
    )


def _ours(row: Row) -> Timing | None:
    return row.ours


def _plain(row: Row) -> Timing | None:
    return row.plain


def _decode(timing: Timing) -> float:
    return timing.decode_s


def _all(timing: Timing) -> float:
    return timing.prefill_s + timing.decode_s


def _speed(
    rows: Iterable[Row],
    side: Callable[[Row], Timing | None],
    seconds: Callable[[Timing], float],
) -> float | None:
    """Tokens/s, each batch's seconds counted once."""
    tokens, batches = 0, {}
    for row in rows:
        timing = side(row)
        if timing is not None:
            tokens += timing.new_tokens
            batches[row.batch] = seconds(timing)
    total = sum(batches.values())
    return tokens / total if total else None


def _ratio(ours: float | None, plain: float | None) -> float | None:
    return ours / plain if ours is not None and plain else None
