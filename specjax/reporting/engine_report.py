"""What an engine has done, as a JSON-ready report and as a picture over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from specjax.decoding.engine.statistics import Statistics, Step
from specjax.reporting.plots import Curve, draw_curves

_POINTS = 60
"""Points of a curve: each stands for the steps that ended in its part of the time."""


def engine_summary(statistics: Statistics) -> dict[str, Any]:
    """The totals, percentiles by name."""
    summary = asdict(statistics.summary())
    for name in ("waiting", "first_token", "between_tokens", "total"):
        percentiles = summary.pop(name)
        summary[f"{name}_s"] = dict(zip(("p50", "p95", "p99"), percentiles, strict=True))
    return {"num_slots": statistics.num_slots, **summary}


def engine_report(statistics: Statistics) -> dict[str, Any]:
    """The summary, and a row of counts for each of the newest steps."""
    steps = [step._asdict() for step in statistics.steps]
    return {"summary": engine_summary(statistics), "steps": steps}


def draw_engine(path: Path, statistics: Statistics, title: str) -> None:
    """Write PNGs: tokens/s, busy slots and waiting requests over the seconds of an engine.

    Time begins when it is made, so that compiling is in it; where no step ended, no slot was busy,
    and how many requests waited is not known. Their names are that of `path` with `_tokens`,
    `_slots` and `_waiting`. Raises InputError where matplotlib is missing.
    """
    steps = list(statistics.steps)
    ends = [step.end_s for step in steps]
    edges = np.linspace(0, max(ends, default=1.0), min(_POINTS, max(len(steps), 1)) + 1)
    parts: list[list[Step]] = [[] for _ in edges[1:]]
    for step, end in zip(steps, np.searchsorted(edges, ends), strict=True):
        parts[max(int(end) - 1, 0)].append(step)
    middles = ((edges[1:] + edges[:-1]) / 2).tolist()
    width = edges[1] - edges[0]

    def curve(label: str, of: Any) -> list[Curve]:
        return [Curve(label, middles, [of(part) for part in parts])]

    def busy(part: Sequence[Step]) -> float:
        rounds = sum(step.rounds for step in part)
        return sum(step.row_rounds for step in part) / rounds if rounds else 0.0

    for suffix, label, of in (
        ("tokens", "tokens/s", lambda part: sum(step.tokens for step in part) / width),
        ("slots", "busy slots", busy),
        ("waiting", "waiting requests", lambda part: part[-1].waiting if part else np.nan),
    ):
        draw_curves(
            path.with_name(f"{path.stem}_{suffix}{path.suffix}"),
            {title: curve(label, of)},
            title=label,
            x_label="seconds",
            y_label=label,
            log_x=False,
        )
