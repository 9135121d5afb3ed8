"""Charts of measured and predicted values (requires the extra `plots`).

The suffix of a path selects the file format, such as .png, .svg or .pdf.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.errors import InputError, printable

# Okabe and Ito's colors, without the yellow, which is invisible on white.
_MARKERS = "os^Dv"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

_MOST_TICKS = 12
"""The maximum number of values on the x axis that have a tick each."""
_LONGEST_LABEL, _LONGEST_TITLE = 60, 160
"""The maximum number of characters of a label, and of a line of a title."""


@dataclass(frozen=True)
class Curve:
    """One line: measured values at `x` and, optionally, predicted ones at `theory_x`.

    Curves of one family share a color, the first in the lightest shade; a curve without a family
    has its own color.
    """

    label: str
    x: Sequence[float]
    measured: Sequence[float]
    theory_x: Sequence[float] = ()
    theory: Sequence[float] = ()
    family: str = ""


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval, if it has one; a `doubtful` value is a hollow mark.

    `note` is a second line below the label. Intervals of one family share a color.
    """

    label: str
    value: float
    ends: tuple[float, float] | None = None
    note: str = ""
    doubtful: bool = False
    family: str = ""


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _require_matplotlib() -> None:
    """Raise InputError if matplotlib is not installed."""
    if not has_matplotlib():
        raise InputError(
            "pictures: matplotlib is not installed; pip install 'specjax[plots]', or leave them out"
        )


def draw_curves(
    path: Path,
    panels: Mapping[str, Sequence[Curve]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    level: float | None = None,
    top: float | None = None,
    log_x: bool = True,
    log_y: bool = False,
    theory_label: str = "roofline",
) -> None:
    """Write a picture with panels of curves side by side: measured lines solid, theory dashed.

    `panels` maps titles to curves. `title` is above all panels, `x_label` and `y_label` name the
    axes, and `theory_label` names the dashed lines. With `log_x` the x axis doubles from tick to
    tick, and with `log_y` the y axis; `level` draws a thin horizontal line, and `top` limits the y
    axis. Raises InputError without matplotlib.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure = Figure(figsize=(1 + 4.5 * len(panels), 4.2), facecolor="white", layout="constrained")
    figure.suptitle(_literal(title, _LONGEST_TITLE), fontsize="medium", wrap=True)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
        if level is not None:
            axes.axhline(level, color="0.6", linewidth=0.8)
        styles = _styles([curve.family for curve in curves])
        for curve, (colour, marker, _) in zip(curves, styles, strict=True):
            axes.plot(
                curve.x, curve.measured, f"{marker}-", color=colour, label=_literal(curve.label)
            )
            axes.plot(curve.theory_x, curve.theory, "--", color=colour, linewidth=1.2)
        if any(curve.theory for curve in curves):
            axes.plot([], [], "--", color="0.3", label=theory_label)
        if log_x:
            axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in curves for x in curve.x})
        if len(ticks) <= _MOST_TICKS:
            axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        if log_y:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.set_title(_literal(name))
        axes.set_xlabel(x_label)
        axes.grid(color="0.9")
    _add_legend(figure, list(all_axes))
    if not log_y:
        # The panels share the axis: set earlier, the limit would be too low for later panels.
        all_axes[0].set_ylim(bottom=0, top=top)
    all_axes[0].set_ylabel(y_label)
    _save(figure, path)


def draw_bars(
    path: Path,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    y_label: str,
    families: Sequence[str] | None = None,
    level: float | None = None,
) -> None:
    """Write a picture with one bar per label in each group, and its value above the bar.

    `bars` maps labels to one value per group; None leaves a gap. `families` has one family per
    label, as in `Curve`; `level` draws a thin horizontal line. Raises InputError without
    matplotlib.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    bar = 0.8 / len(bars)
    # Inches per bar: as wide as its value where that leaves the picture readable.
    inches = min(0.36, max(0.13, 12 / (len(groups) * len(bars))))
    width = max(6.5, 1 + len(groups) * (0.35 + inches * len(bars)))
    figure = Figure(figsize=(width, 4.2), facecolor="white", layout="constrained")
    axes = figure.subplots()
    figure.suptitle(_literal(title, _LONGEST_TITLE), fontsize="medium", wrap=True)
    if level is not None:
        axes.axhline(level, color="0.6", linewidth=0.8)
    styles = _styles(families or [""] * len(bars))
    for number, (label, values) in enumerate(bars.items()):
        indices = [index + (number + 0.5) * bar - 0.4 for index in range(len(groups))]
        known = [pair for pair in zip(indices, values, strict=True) if pair[1] is not None]
        x, heights = [index for index, _ in known], [height for _, height in known]
        colour, _, hatch = styles[number]
        drawn = axes.bar(x, heights, 0.92 * bar, color=colour, hatch=hatch, label=_literal(label))
        upright = 90 * (inches < 0.3)
        axes.bar_label(drawn, fmt="%.2f", fontsize="x-small", padding=2, rotation=upright)
    axes.set_xticks(range(len(groups)), list(map(_literal, groups)))
    axes.set_ylabel(y_label)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _add_legend(figure, [axes])
    _save(figure, path)


def draw_intervals(
    path: Path,
    rows: Sequence[Interval],
    *,
    title: str,
    x_label: str,
    level: float | None = None,
) -> None:
    """Write a picture with one row per value, top to bottom, with its interval and its number.

    `title` is the heading, and `x_label` names the axis of the values. `level` draws a thin
    vertical line. Raises InputError without matplotlib.
    """
    _require_matplotlib()
    from matplotlib.figure import Figure

    height = 1.4 + 0.5 * len(rows)
    figure = Figure(figsize=(8.5, height), facecolor="white", layout="constrained")
    axes = figure.subplots()
    figure.suptitle(_literal(title, _LONGEST_TITLE), fontsize="medium", wrap=True)
    if level is not None:
        axes.axvline(level, color="0.6", linewidth=0.8)
    styles = _styles([row.family for row in rows])
    for index, (row, (colour, marker, _)) in enumerate(zip(rows, styles, strict=True)):
        if row.ends is not None:
            axes.plot(row.ends, (index, index), "|-", color=colour, markersize=9)
        face = "white" if row.doubtful else colour
        axes.plot(row.value, index, marker, color=colour, markerfacecolor=face)
        above = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
        axes.annotate(f"{row.value:.2f}", (row.value, index), fontsize="x-small", **above)
    names = [f"{_literal(row.label)}\n{_literal(row.note)}".rstrip() for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.7)
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    axes.set_xlabel(x_label)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _add_legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """Put one legend below all axes, in as many columns as the width of its labels allows."""
    entries: dict[str, Any] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    inches = 0.5 + 0.085 * max(map(len, entries))  # a line and a label in small letters
    columns = min(len(entries), max(1, int(figure.get_figwidth() / inches)))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        frameon=False,
    )


def _styles(families: Sequence[str]) -> list[tuple[Any, str, str]]:
    """Return the color, marker and hatch for each entry of `families`, which may be "".

    Entries of a family have shades of one color, the last one the full color.
    """
    from matplotlib.colors import to_rgb

    names = [family or f"\0{index}" for index, family in enumerate(families)]
    order = list(dict.fromkeys(names))
    styles = []
    for index, name in enumerate(names):
        number, before = order.index(name), names[:index].count(name)
        paleness = 0.65 * (1 - (before + 1) / names.count(name))
        colour = to_rgb(_COLOURS[number % len(_COLOURS)])
        colour = tuple(channel + (1 - channel) * paleness for channel in colour)
        again = number // len(_COLOURS)
        styles.append((colour, _MARKERS[(before + again) % len(_MARKERS)], "//" * again))
    return styles


def _literal(text: str, longest: int = _LONGEST_LABEL) -> str:
    """Return a text that matplotlib draws literally, without the middle of a very long line.

    Formulas and unprintable characters are escaped. A label that begins with _ is indented, since
    legends omit such labels.
    """
    lines = [printable(line) for line in text.split("\n")]
    text = "\n".join(_shortened(line, longest) for line in lines)
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _shortened(text: str, longest: int) -> str:
    """Return a text without its middle if it has more than `longest` characters."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def _save(figure: Any, path: Path) -> None:
    """Write a figure to a file, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(path, dpi=150)
