"""Measured curves beside what theory says of them, as pictures (needs the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specjax.errors import InputError

# Okabe and Ito's colours, without the yellow that white swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


@dataclass(frozen=True)
class Curve:
    """One line: what was measured at `x`, and what theory says at `theory_x`."""

    label: str
    x: Sequence[float]
    measured: Sequence[float]
    theory_x: Sequence[float]
    theory: Sequence[float]


def require_matplotlib() -> None:
    """Raise InputError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(
            "pictures: matplotlib is not installed; pip install 'specjax[plots]', or leave them out"
        ) from None


def draw_curves(
    path: Path,
    panels: Mapping[str, Sequence[Curve]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    level: float | None = None,
    log_y: bool = False,
) -> None:
    """Write a PNG: panels side by side, measured lines solid with dots, theory dashed.

    The x axis doubles from tick to tick, and with `log_y` the y axis too; `level` draws a thin
    horizontal line. Raises InputError where matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure = Figure(figsize=(1 + 4.5 * len(panels), 4.2), facecolor="white", layout="constrained")
    figure.suptitle(title)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
        if level is not None:
            axes.axhline(level, color="0.6", linewidth=0.8)
        for number, curve in enumerate(curves):
            colour = _COLOURS[number % len(_COLOURS)]
            axes.plot(curve.x, curve.measured, "o-", color=colour, label=curve.label)
            axes.plot(curve.theory_x, curve.theory, "--", color=colour, linewidth=1.2)
        axes.plot([], [], "--", color="0.3", label="roofline")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for curve in curves for x in curve.x}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(ScalarFormatter())
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(name)
        axes.set_xlabel(x_label)
        axes.grid(color="0.9")
        axes.legend(fontsize="small")
    all_axes[0].set_ylabel(y_label)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
