"""The report's pictures: acceptance by position, tau by task, speed-up against K."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specjax.reporting.plots import Curve, draw_bars, draw_curves
from specjax.reporting.records import Conditions
from specjax.reporting.runs import Entry, by_conditions
from specjax.reporting.statistics import OVERALL, heading, tasks_of

_PICTURES = ("speedup_by_k", "tau_by_task", "acceptance_by_position")


def _ends(num_groups: int) -> list[str]:
    return [f"-{number}.png" for number in range(1, num_groups + 1)] if num_groups > 1 else [".png"]


def draw(folder: Path, entries: Sequence[Entry]) -> dict[Conditions, list[tuple[str, str]]]:
    """Write the pictures of each set of conditions; returns their (title, file name)."""
    groups = by_conditions(entries)
    written: dict[Conditions, list[tuple[str, str]]] = {}
    kinds = (
        ("Speed-up against draft length", _draw_speedup),
        ("Tau by task", _draw_tau),
        ("Acceptance by position", _draw_acceptance),
    )
    for end, (conditions, group) in zip(_ends(len(groups)), groups.items(), strict=False):
        written[conditions] = []
        for name, (title, picture) in zip(_PICTURES, kinds, strict=True):
            if picture(folder / (name + end), group, str(conditions)):
                written[conditions].append((title, name + end))
    return written


def _draw_acceptance(path: Path, group: Sequence[Entry], where: str) -> bool:
    panels: dict[str, list[Curve]] = {"all up to here": [], "given those before": []}
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
    if not panels["all up to here"]:
        return False
    draw_curves(
        path,
        panels,
        title=f"Draft tokens accepted\n{where}",
        x_label="position in the draft",
        y_label="share accepted",
        top=1.03,
        log_x=False,
    )
    return True


def _draw_tau(path: Path, group: Sequence[Entry], where: str) -> bool:
    tasks = [*tasks_of(entry.run for entry in group), OVERALL]
    bars = {
        entry.label: [entry.figures[task].counts.acceptance_length for task in tasks]
        for entry in group
    }
    draw_bars(
        path,
        [*map(heading, tasks[:-1]), "All"],
        bars,
        title=f"Tau: tokens per round\n{where}",
        y_label="tokens per round",
        families=[entry.family for entry in group],
        level=1.0,
    )
    return True


def _draw_speedup(path: Path, group: Sequence[Entry], where: str) -> bool:
    """One line for each family of runs that differ only in K; False where there is none."""
    families: dict[str, list[Entry]] = {}
    for entry in group:
        if entry.run.draft_length is not None and entry.figures[OVERALL].speedup is not None:
            families.setdefault(entry.family, []).append(entry)
    curves = []
    for members in families.values():
        members.sort(key=lambda entry: entry.run.draft_length)
        if len({entry.run.draft_length for entry in members}) > 1:
            curves.append(_curve(members))
    if not curves:
        return False
    draw_curves(
        path,
        {"": curves},
        title=f"Speed-up against draft length\n{where}",
        x_label="K (draft tokens per round, at most)",
        y_label="speed-up over plain decoding (times)",
        level=1.0,
        theory_label="predicted from its parts",
    )
    return True


def _curve(members: Sequence[Entry]) -> Curve:
    predicted = [entry for entry in members if entry.predicted is not None]
    return Curve(
        _without_length(members[0].label),
        [entry.run.draft_length for entry in members],
        [entry.figures[OVERALL].speedup for entry in members],
        [entry.run.draft_length for entry in predicted],
        [entry.predicted for entry in predicted],
    )


def _without_length(label: str) -> str:
    return " ".join(part for part in label.split(" ") if not part.startswith("K="))
