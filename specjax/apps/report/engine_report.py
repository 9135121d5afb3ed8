"""Statistics of an engine, as a JSON-ready report and as pictures over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specjax.apps.report.plots import Curve, draw_curves
from specjax.apps.rows.statistics import engine_summary
from specjax.engine.statistics import Statistics

_POINTS = 60
"""The number of points of a curve; each shows the mean over an equal part of the time."""


def engine_report(statistics: Statistics) -> dict[str, Any]:
    """Return an engine's summary and, in lists, the counts of each of its latest steps.

    The result is JSON-ready.
    """
    steps = [step._asdict() for step in statistics.steps]
    return {"summary": engine_summary(statistics), "steps": steps}


def draw_engine(path: Path, statistics: Statistics, title: str) -> None:
    """Write PNGs of tokens/s, busy slots and waiting requests over the seconds of an engine.

    The file names add `_tokens`, `_slots` and `_waiting` to that of `path`, and `title` is the
    heading of each. Time begins with the engine, compiling included, or with the oldest recorded
    step. Between steps no slot is busy and the number of waiting requests is unknown. Raises
    InputError without matplotlib.
    """
    steps = list(statistics.steps)
    ends = np.array([step.end_s for step in steps] or [1.0])
    begins = ends - np.array([step.seconds for step in steps] or [1.0])
    kept_all = sum(step.rounds for step in steps) == statistics.rounds
    edges = np.linspace(0.0 if kept_all else begins.min(), ends.max(), _POINTS + 1)
    covered = np.zeros(_POINTS)
    sums = {name: np.zeros(_POINTS) for name in ("tokens", "slots", "waiting")}
    for step, begin, end in zip(steps, begins, ends, strict=False):
        # The seconds of the step in each part of the time.
        seconds = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0.0, None)
        covered += seconds
        sums["tokens"] += step.tokens / max(step.seconds, 1e-9) * seconds
        sums["slots"] += step.row_rounds / step.rounds * seconds
        sums["waiting"] += step.waiting * seconds
    width = edges[1] - edges[0]
    known = np.where(covered > 0, covered, np.nan)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    for name, label, values in (
        ("tokens", "tokens/s", sums["tokens"] / width),
        ("slots", "busy slots", sums["slots"] / width),
        ("waiting", "waiting requests", sums["waiting"] / known),
    ):
        draw_curves(
            path.with_name(f"{path.stem}_{name}{path.suffix}"),
            {title: [Curve(label, middles, values.tolist())]},
            title=label,
            x_label="seconds",
            y_label=label,
            log_x=False,
        )
