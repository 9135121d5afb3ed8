"""Pictures of the report: speed-up (also by draft length), tokens per pass, acceptance.

The second line of a picture's title states the conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specjax.apps.report.best_length import BestLength, best_lengths
from specjax.apps.report.plots import Curve, Interval, draw_bars, draw_curves, draw_intervals
from specjax.apps.report.runs import Entry, by_conditions
from specjax.apps.rows.records import Conditions
from specjax.apps.rows.statistics import FEW, OVERALL, heading, noise_remark, tasks_of

FORMATS = ("png", "svg", "pdf")
"""The file formats of pictures."""
_NAMES = ("speedup", "speedup_by_length", "tokens_per_pass", "acceptance_by_position")


def _ends(num_groups: int) -> list[str]:
    """Return the suffix of the file names of each group's pictures."""
    return [f"-{number}" for number in range(1, num_groups + 1)] if num_groups > 1 else [""]


def draw(
    folder: Path, entries: Sequence[Entry], formats: Sequence[str] = FORMATS[:1]
) -> dict[Conditions, list[tuple[str, str]]]:
    """Write the pictures of a report to `folder`, one set for all entries of equal conditions.

    Each picture is written in all `formats`, such as "png". Returns the (title, file name) of each
    picture by conditions, with the name in the first format.
    """
    groups = by_conditions(entries)
    written: dict[Conditions, list[tuple[str, str]]] = {}
    kinds = (
        ("Speed-up over plain decoding", _draw_speedup),
        ("Speed-up against draft length", _draw_speedup_by_length),
        ("Tokens per pass by task", _draw_tokens_per_pass),
        ("Acceptance by position", _draw_acceptance),
    )
    for end, (conditions, group) in zip(_ends(len(groups)), groups.items(), strict=False):
        written[conditions] = []
        for name, (title, picture) in zip(_NAMES, kinds, strict=True):
            files = [f"{name}{end}.{kind}" for kind in formats]
            drawn = [picture(folder / file, group, f"{title}\n{conditions}") for file in files]
            if any(drawn):
                written[conditions].append((title, files[0]))
    return written


def _draw_speedup(path: Path, group: Sequence[Entry], title: str) -> bool:
    """Draw the speed-up of each run with its interval; return False if no run has one."""
    rows = []
    for entry in group:
        figures = entry.figures[OVERALL]
        if figures.speedup is not None:
            counts = figures.counts
            note = f"{counts.num_requests} answers, {counts.num_emitted_tokens} tokens"
            if remark := noise_remark(figures.speedup, figures.possible_speedup):
                note += f"; {remark}"
            ends, doubtful = figures.speedup_interval, figures.few or figures.noisy
            rows.append(Interval(entry.label, figures.speedup, ends, note, doubtful, entry.family))
    if not rows:
        return False
    hollow = (
        f"; hollow: fewer than {FEW} answers, or more than is possible"
        if any(row.doubtful for row in rows)
        else ""
    )
    draw_intervals(
        path,
        rows,
        title=title,
        x_label=f"times as fast as plain decoding, with 95 % intervals{hollow}",
        level=1.0,
    )
    return True


def _draw_acceptance(path: Path, group: Sequence[Entry], title: str) -> bool:
    """Draw the acceptance by position of each run; return False if nothing was drafted."""
    panels: dict[str, list[Curve]] = {"cumulative": [], "conditional": []}
    for entry in group:
        counts = entry.figures[OVERALL].counts
        for curves, values in zip(
            panels.values(),
            (counts.acceptance_at_pos, counts.cond_acceptance_at_pos),
            strict=True,
        ):
            known = [(index, value) for index, value in enumerate(values, 1) if value is not None]
            if known:
                x, y = map(list, zip(*known, strict=True))
                curves.append(Curve(entry.label, x, y, family=entry.family))
    if not panels["cumulative"]:
        return False
    draw_curves(
        path,
        panels,
        title=title,
        x_label="position in the draft, from 1",
        y_label="share accepted",
        top=1.03,
        log_x=False,
    )
    return True


def _draw_tokens_per_pass(path: Path, group: Sequence[Entry], title: str) -> bool:
    """Draw the tokens per pass of each run by task; return True."""
    tasks = [*tasks_of(entry.run for entry in group), OVERALL]
    bars = {
        entry.label: [entry.figures[task].counts.acceptance_length for task in tasks]
        for entry in group
    }
    draw_bars(
        path,
        [*map(heading, tasks[:-1]), "All"],
        bars,
        title=title,
        y_label="tokens per pass",
        families=[entry.family for entry in group],
        level=1.0,
    )
    return True


def _draw_speedup_by_length(path: Path, group: Sequence[Entry], title: str) -> bool:
    """Draw a line per family of runs that differ in draft length; return False without one."""
    curves = []
    for family, best in best_lengths(group).items():
        members = [entry for entry in group if entry.family == family]
        curves.append(_curve(sorted(members, key=lambda entry: entry.run.draft_length), best))
    if not curves:
        return False
    draw_curves(
        path,
        {"": curves},
        title=title,
        x_label="most draft tokens per pass",
        y_label="times as fast as plain decoding",
        level=1.0,
        theory_label="predicted from its parts, or by acceptance and cost",
    )
    return True


def _curve(members: Sequence[Entry], best: BestLength) -> Curve:
    """Return the speed-ups of a family's runs by draft length, with predicted ones."""
    lengths = [entry.run.draft_length for entry in members]
    predicted = {
        length: entry.predicted
        for length, entry in zip(lengths, members, strict=True)
        if entry.predicted
    }
    expected = predicted or dict(enumerate(best.expected[1:], 1))
    return Curve(
        best.label,
        lengths,
        [entry.figures[OVERALL].speedup for entry in members],
        list(expected),
        list(expected.values()),
    )
