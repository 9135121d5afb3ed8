"""Draw docs/drafters.svg: tau and speed-ups by drafter, from two tables of docs/results.md.

    python scripts/draw_drafters.py

Needs matplotlib: pip install '.[plots]'.
"""

from __future__ import annotations

import re
from pathlib import Path

from absl import app

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {"fixed": "#56B4E9", "auto": "#0072B2"}


def read_table(page: str, title: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (tau, speed-up) by drafter and kind of draft length, from a section's table."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    figures = {}
    for line in section.splitlines():
        if (found := re.match(r"\| `([\w+]+)`", line)) is None:
            continue
        name = found[1]
        cells = [cell.strip().rstrip("x") for cell in line.strip("|").split("|")]
        tau_fixed, speed_fixed, _, tau_auto, speed_auto, _ = map(float, cells[2:])
        figures[name] = {"fixed": (tau_fixed, speed_fixed), "auto": (tau_auto, speed_auto)}
    return figures


def main(argv: list[str]) -> None:
    """Write the picture."""
    del argv
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and equal figures give equal files.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "specjax"})
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    precise = read_table(page, "Every drafter")
    rounded = read_table(page, "With activations of 8 bits")
    names = sorted(rounded, key=lambda name: rounded[name]["auto"][1])
    figure = Figure(figsize=(11, 3.6), facecolor="white", layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    shown = (
        ("tau: tokens per pass of the target", precise, 0),
        ("speed-up, activations of 24 bits", precise, 1),
        ("speed-up, activations of 8 bits", rounded, 1),
    )
    for axes, (title, figures, index) in zip(panels, shown, strict=True):
        for offset, (lengths, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
            values = [figures[name][lengths][index] for name in names]
            places = [place - offset for place in range(len(names))]
            bars = axes.barh(places, values, 0.38, color=colour, label=lengths)
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
        axes.axvline(1, color="0.3", linewidth=0.8)
        axes.set_title(title, fontsize="medium")
        axes.set_yticks(range(len(names)), names)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(loc="lower right", title="draft lengths", fontsize="small", frameon=False)
    figure.savefig(DOCS / "drafters.svg", metadata={"Date": None})
    print("wrote docs/drafters.svg")


if __name__ == "__main__":
    app.run(main)
