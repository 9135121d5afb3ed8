"""The report in Markdown, in the layout of Spec-Bench's leaderboard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specjax.apps.report.best_length import BestLength, best_lengths
from specjax.apps.report.runs import Entry, by_conditions
from specjax.apps.rows.decode_table import nothing_drafted
from specjax.apps.rows.records import Conditions, Run
from specjax.apps.rows.statistics import FEW, OVERALL, Figures, heading, tasks_of
from specjax.apps.rows.weight_reads import weight_reads_line
from specjax.core.none import PLAIN_DECODING
from specjax.errors import printable

_Value = TypeVar("_Value")
_TOKENS_PER_PASS = "Tokens per pass"
_FEW = "\u2020"
"""The mark of figures of few answers or drafts."""
_NOISY = "\u2021"
"""The mark of speed-ups that exceed the tokens per pass."""
_NOISY_NOTE = (
    f"\n{_NOISY} more than is possible, which is the tokens per pass: the clock is noisy. It ranks "
    "as what is possible, and is not in bold.\n"
)


def leaderboard(entries: Sequence[Entry]) -> str:
    """Return a table of speed-ups by task and overall, with one line per run.

    The best value of a column is in bold, unless it covers few answers or is not possible. Such
    values are marked and explained in notes below the table.
    """
    table = _by_task(
        entries,
        _SPEEDUP,
        ((_TOKENS_PER_PASS, _TAU), ("Speed-up", _SPEEDUP)),
        mark_partial=True,
    )
    few = f"\n{_FEW} from fewer than {FEW} answers: neither ranked nor in bold.\n"
    return table + few * (_FEW in table.partition("\n")[0]) + _NOISY_NOTE * (_NOISY in table)


def markdown(
    entries: Sequence[Entry],
    pictures: Mapping[Conditions, Sequence[tuple[str, str]]],
) -> str:
    """Return the whole report as Markdown: for each set of conditions its tables and pictures.

    `pictures` are the (title, file name) of each picture, by conditions.
    """
    first = entries[0].run
    blocks = [f"# {_plain_text(first.target)}\n", _versions(first)]
    for conditions, group in by_conditions(entries).items():
        blocks += [f"## {_plain_text(str(conditions))}\n", *_section(group)]
        blocks += [f"![{title}]({file})\n" for title, file in pictures.get(conditions, ())]
    return "\n".join(blocks)


def incomplete(group: Sequence[Entry]) -> str:
    """Return lines about incomplete runs and answers that are left out, or "" if there are none.

    They say why a run is incomplete, and how many answers are concerned.
    """
    lines = []
    if stopped := [_answers(entry) for entry in group if entry.run.end.interrupted]:
        end = "ended, or was killed, before all of its prompts were answered"
        lines.append(f"Interrupted: {'; '.join(stopped)}. Such a run {end}.\n")
    lines += [
        f"Later turns refused: {_answers(entry)}: {_plain_text(entry.run.end.refused)}.\n"
        for entry in group
        if entry.run.end.refused
    ]
    if left := [
        _answers(entry, entry.run.num_left_out) for entry in group if entry.run.num_left_out
    ]:
        lines.append(
            f"Only prompts that all runs answered are compared: left out are {'; '.join(left)}.\n"
        )
    return "\n".join(lines)


def _answers(entry: Entry, count: int | None = None) -> str:
    """Return the label of a run with a number of answers, by default of all its answers."""
    if count is None:
        count = len(entry.run.rows) + entry.run.num_left_out
    return f"{_plain_text(entry.label)} ({count} answer{'' if count == 1 else 's'})"


def _section(group: Sequence[Entry]) -> list[str]:
    """Return the blocks of Markdown about runs under the same conditions."""
    blocks = [
        "### Speed-up over plain decoding\n",
        leaderboard(group),
        "Tokens per second with the drafter over those of plain decoding, in the same loop and "
        "over the same prompts, pooled, without prefill and compiling."
        + (" \\* over the batches that hold only this task." if _any_partial(group) else "")
        + " In brackets: the number of answers.\n",
    ]
    blocks += [
        f"{_plain_text(entry.label)}: {reason}. Its speed-up is chance, or the cost of looking.\n"
        for entry in group
        if (reason := nothing_drafted(entry.run, entry.figures[OVERALL]))
    ]
    if note := incomplete(group):
        blocks.append(note)
    blocks += [
        f"95 % intervals, from the variation between {FEW} answers or more:\n",
        _intervals(group, lambda figures: figures.speedup_interval),
        "### Tokens per pass\n",
        _by_task(group, _TAU, (("All", _TAU),)),
        "95 % intervals:\n",
        _intervals(group, lambda figures: figures.acceptance_length_interval),
        "Mean over requests:\n",
        _by_task(group, _TAU_PER_REQUEST, (("All", _TAU_PER_REQUEST),)),
        "### All tasks together\n",
        _details(group),
        *_weight_reads(group),
        "### Acceptance by position\n",
        _positions(group),
    ]
    if lengths := best_lengths(group):
        blocks += ["### The best draft length\n", _lengths(list(lengths.values()))]
    if chosen := [entry for entry in group if entry.run.auto]:
        blocks += ["### What auto chose\n", _auto(chosen)]
    return blocks


def _intervals(
    group: Sequence[Entry], value: Callable[[Figures], tuple[float, float] | None]
) -> str:
    """Return a table of 95 % intervals by task and over all tasks, omitting few answers."""
    tasks = tasks_of(entry.run for entry in group)
    rows = [[_plain_text(entry.label)] for entry in group]
    for row, entry in zip(rows, group, strict=True):
        for figures in (entry.figures[task] for task in (*tasks, OVERALL)):
            row.append(_cell(None if figures.few else value(figures), _interval))
    return _table(["Drafter", *(_plain_text(heading(task)) for task in tasks), "All"], rows)


def _lengths(families: Sequence[BestLength]) -> str:
    """Return the table of best draft lengths, with an explanation."""
    rows = []
    for family in families:
        figures = family.best.figures[OVERALL]
        cost = f"{family.round_cost:.2f} {family.token_cost:+z.3f} K"
        expected = []
        if family.expected:
            expected = [str(family.expected_length), _times(max(family.expected))]
        rows.append(
            [
                _plain_text(family.label),
                str(family.best.run.draft_length),
                _SPEEDUP.cell(figures),
                _cell(figures.speedup_interval, _interval),
                *(expected or ["n/a"] * 2),
                cost,
            ]
        )
    head = ["Drafter", "fastest K", "speed-up", "95 % interval", "expected K", "speed-up"]
    return (
        _table([*head, "cost of a round"], rows)
        + "\nExpected: tokens per round, by the acceptance by position of the longest drafts, over "
        "the cost of a round in passes of plain decoding, a line fitted to the seconds of all "
        "lengths. K is the number of draft tokens, and 0 plain decoding. Not defined for trees.\n"
    )


def _auto(group: Sequence[Entry]) -> str:
    """Return the table of the draft lengths that the controller `auto` chose."""
    rows = []
    for entry in group:
        counts = entry.figures[OVERALL].counts
        rows.append(
            [
                _plain_text(entry.label),
                _cell(counts.share_drafted, "{:.0%}".format),
                _cell(counts.drafted_per_round, _number),
                _by_width(counts.rounds_by_width, "d"),
            ]
        )
    head = ["Drafter", "passes with a draft", "draft tokens per pass", "passes by width"]
    return _table(head, rows)


def _by_width(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{width}: {value:{form}}" for width, value in values.items())


def _details(group: Sequence[Entry]) -> str:
    """Return a table with all overall figures of each run."""
    predicted = any(entry.predicted is not None for entry in group)
    sized = any(entry.run.drafter_bytes is not None for entry in group)
    head = ["Drafter", "answers", *_DETAILS, "same tokens"]
    rows = []
    for entry in group:
        figures = entry.figures[OVERALL]
        cells = [measure.cell(figures) for measure in _DETAILS.values()]
        compared = f"{figures.identical_rows} of {figures.compared_rows}"
        cells.append("n/a" if figures.identical_rows is None else compared)
        if sized:
            cells.append(_cell(entry.run.drafter_bytes, lambda size: f"{size / 1e6:.1f}"))
        if predicted:
            cells += [_cell(entry.predicted, _times), _cell(entry.efficiency, _number)]
        answers = f"{figures.counts.num_requests}{_FEW * figures.few}"
        rows.append([_plain_text(entry.label), answers, *cells])
    head += ["MB"] * sized
    if predicted:
        head += ["predicted", "measured / predicted"]
    size = "\nMB: the drafter's own parameters in memory, without those of its target.\n"
    return _table(head, rows) + size * sized


def _weight_reads(group: Sequence[Entry]) -> list[str]:
    """Return a line about the weights that plain decoding reads, from the first run that knows."""
    for entry in sorted(group, key=lambda entry: entry.run.drafter != PLAIN_DECODING):
        bandwidth = entry.run.end.memory_bandwidth
        if line := weight_reads_line(entry.run, entry.figures[OVERALL], bandwidth):
            return [f"{line[0].upper()}{line[1:]}.\n"]
    return []


def _positions(group: Sequence[Entry]) -> str:
    """Return the table of acceptance by position, with an explanation."""
    all_counts = [entry.figures[OVERALL].counts for entry in group]
    most = max(len(counts.acceptance_at_pos) for counts in all_counts)
    if not most:
        return "Nothing was drafted.\n"
    rows = []
    for entry, counts in zip(group, all_counts, strict=True):
        # The number of drafts whose tokens before each position were all accepted.
        reached = (counts.num_drafts, *counts.num_accepted_tokens_per_pos)
        for name, values, samples in (
            ("cumulative", counts.acceptance_at_pos, [counts.num_drafts] * most),
            ("conditional", counts.cond_acceptance_at_pos, reached),
        ):
            cells = [
                _cell(value, _number) + _FEW * (value is not None and count < FEW)
                for value, count in zip(values, samples, strict=False)
            ]
            rows.append([_plain_text(entry.label), name, *cells, *[""] * (most - len(cells))])
    table = _table(["Drafter", "acceptance", *(str(1 + index) for index in range(most))], rows)
    return (
        f"{table}\nBy position in the draft, from 1. Cumulative: the share of drafts accepted "
        "up to there; conditional: of those accepted up to the position before, and drafted this "
        f"far. {_FEW} fewer than {FEW} drafts.\n"
    )


def _by_task(
    group: Sequence[Entry],
    measure: _Measure,
    last: Sequence[tuple[str, _Measure]],
    *,
    mark_partial: bool = False,
) -> str:
    """Return a table with a column of `measure` per task, and the columns `last` over all tasks.

    With `mark_partial`, speeds that cover only some of a task's answers are marked.
    """
    columns: list[tuple[str, list[str]]] = []
    for task in tasks_of(entry.run for entry in group):
        cells = _cells([entry.figures[task] for entry in group], measure)
        if mark_partial:
            cells = [
                cell + "\\*" * _partial(entry.figures[task])
                for cell, entry in zip(cells, group, strict=True)
            ]
        few = group[0].figures[task].few
        answers = group[0].figures[task].counts.num_requests
        columns.append((f"{_plain_text(heading(task))} ({answers}){_FEW * few}", cells))
    for name, last_measure in last:
        figures = [entry.figures[OVERALL] for entry in group]
        columns.append((name + _FEW * figures[0].few, _cells(figures, last_measure)))
    rows = [
        [_plain_text(entry.label), *(cells[index] for _, cells in columns)]
        for index, entry in enumerate(group)
    ]
    return _table(["Drafter", *(name for name, _ in columns)], rows)


def _partial(figures: Figures) -> bool:
    """Return whether the speeds cover only some of the answers."""
    return 0 < figures.timed_requests < figures.counts.num_requests


def _any_partial(group: Sequence[Entry]) -> bool:
    return any(_partial(figures) for entry in group for figures in entry.figures.values())


def _cells(figures: Sequence[Figures], measure: _Measure) -> list[str]:
    """Return the cells of a column, with the largest value in bold.

    Nothing is in bold if there is only one value, if there are few answers, or if the largest value
    is not credible.
    """
    cells = [measure.cell(of_run) for of_run in figures]
    known = [of_run for of_run in figures if measure.value(of_run) is not None]
    if len(known) < 2 or figures[0].few:
        return cells
    largest = max(known, key=measure.credible or measure.value)
    if measure.exceeds(largest):
        return cells
    best = measure.cell(largest)
    return [f"**{cell}**" if cell == best else cell for cell in cells]


def _versions(run: Run) -> str:
    """Return the line with the number of answers by task and the versions of packages."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    tasks = ", ".join(
        f"{task} {sum(row.task == task for row in run.rows)}" for task in tasks_of([run])
    )
    return (
        _plain_text(f"Answers: {tasks}." + (f" Versions: {versions}." if versions else "")) + "\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is left-aligned and the others right-aligned."""
    rows = [head, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |\n"

    rule = [":".ljust(widths[0], "-"), *("-" * (width - 1) + ":" for width in widths[1:])]
    return line(rows[0]) + line(rule) + "".join(map(line, rows[1:]))


def _cell(value: _Value | None, form: Callable[[_Value], str]) -> str:
    """Return the text of a value in a cell; "n/a" for None."""
    return "n/a" if value is None else form(value)


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _interval(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _number(value: float) -> str:
    return f"{value:.2f}"


@dataclass(frozen=True)
class _Measure:
    """A value of figures, None if undefined, its text, and its credible part, by default all.

    A cell marks a value that exceeds the credible one.
    """

    value: Callable[[Figures], Any]
    form: Callable[[Any], str]
    credible: Callable[[Figures], Any] | None = None

    def exceeds(self, figures: Figures) -> bool:
        """Return whether the value is more than is credible."""
        return self.credible is not None and self.credible(figures) != self.value(figures)

    def cell(self, figures: Figures) -> str:
        """Return the text of a cell."""
        return _cell(self.value(figures), self.form) + _NOISY * self.exceeds(figures)


_SPEEDUP = _Measure(lambda one: one.speedup, _times, lambda one: one.credible_speedup)
_TAU = _Measure(lambda one: one.counts.acceptance_length, _number)
_TAU_PER_REQUEST = _Measure(lambda one: one.counts.acceptance_length_per_request, _number)
_DETAILS: Mapping[str, _Measure] = {
    "tokens/s": _Measure(lambda one: one.tokens_per_second, "{:.1f}".format),
    "plain tokens/s": _Measure(lambda one: one.plain_tokens_per_second, "{:.1f}".format),
    "speed-up": _SPEEDUP,
    "95 % interval": _Measure(lambda one: one.speedup_interval, _interval),
    "mean over requests": _Measure(lambda one: one.speedup_per_request, _times),
    "with prefill": _Measure(lambda one: one.speedup_with_prefill, _times),
    "tokens per pass": _TAU,
    "with a draft": _Measure(lambda one: one.counts.tau_drafted, _number),
    "output tokens per pass": _Measure(lambda one: one.counts.tokens_per_round, _number),
    "accepted / drafted": _Measure(lambda one: one.counts.acceptance_rate, "{:.3f}".format),
}
"""The columns of the table of all tasks together, by heading."""


def _plain_text(text: Any) -> str:
    """Return a text on one line, escaped for Markdown and for a terminal."""
    shown = printable(str(text))
    escaped = "".join("\\" + letter if letter in "\\`*<>|" else letter for letter in shown)
    return " ".join(escaped.split())
