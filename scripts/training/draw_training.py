"""Draw how a run of `train.mtp` learned.

    python scripts/training/draw_training.py --workdir=W --out=curves.svg --bigram=4.956

Over the tokens that it was trained on, from W/metrics.jsonl: the model's own loss and that of each
draft (nats per token; lines while training, dots held out), with `--bigram` the loss of a bigram of
the same text, and how often each draft is what the model itself finds likeliest. The ending of FILE
(svg, png, pdf) is its format. Needs matplotlib: pip install -e '.[plots]'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.errors import InputError
from specjax.fields import Number, OutputFile, PathOrName, optional
from specjax.reporting.plots import require_matplotlib
from train.run.workdir import Workdir, read_metrics

FORMATS = (".svg", ".png", ".pdf")
LOSS, AGREES = r"loss_(lm|mtp_\d+)", r"acc_pos_(\d+)"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return command.run(_draw, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/training/draw_training.py", __doc__)
    flags.add_field("workdir", PathOrName(), "the folder of the run")
    flags.add_field("out", OutputFile(), "the picture; its ending is the format")
    flags.add_field("bigram", optional(Number(above=True)), "a bigram's loss", default=None)
    return flags


def _draw(argv: list[str]) -> int:
    options = SimpleNamespace(**parser().read(argv))
    if options.out.suffix not in FORMATS:
        raise InputError(f"out={str(options.out)!r}: use one of the endings {', '.join(FORMATS)}")
    require_matplotlib()
    rows = read_metrics(Workdir(Path(options.workdir)))
    losses, shares = curves(rows, LOSS), curves(rows, AGREES)
    if not losses:
        raise InputError(
            f"workdir={options.workdir!r}: its metrics.jsonl has no losses of train.mtp; give the "
            "workdir of such a run"
        )
    draw(options.out, losses, shares, options.bigram)
    print(f"wrote {options.out}")
    return 0


def curves(
    rows: Sequence[Mapping[str, Any]], pattern: str
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """By part of a run (train, eval) and what the pattern names: millions of tokens, and values."""
    tokens, found = 0.0, {}
    for row in rows:
        tokens = row.get("train/tokens", tokens)
        for name, value in row.items():
            if match := re.fullmatch(rf"(train|eval)/{pattern}", name):
                x, y = found.setdefault((match[1], match[2]), ([], []))
                x.append(tokens / 1e6)
                y.append(value)
    return found


def draw(out: Path, losses: Mapping, shares: Mapping, bigram: float | None) -> None:
    """Write the picture of `curves`; `bigram` is a level among the losses."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), facecolor="white", layout="constrained")
    parts = (losses, "nats per token"), (shares, "share that the model finds likeliest")
    for axes, (found, label) in zip(figure.subplots(1, 2), parts, strict=True):
        colours = {}
        for (part, name), (x, y) in found.items():
            colour = colours.setdefault(name, f"C{len(colours)}")
            shown = "model" if name == "lm" else f"draft {name.removeprefix('mtp_')}"
            if part == "train":
                axes.plot(x, y, color=colour, alpha=0.6, linewidth=1)
            else:
                axes.plot(x, y, "o", color=colour, label=f"{shown}, held out")
        axes.set_xlabel("tokens trained on, millions")
        axes.set_ylabel(label)
        axes.grid(color="0.9")
    if bigram is not None:
        figure.axes[0].axhline(bigram, color="0.4", linestyle="--", label="bigram, held out")
    for axes in figure.axes:
        axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    # The same numbers make the same file.
    with rc_context({"svg.hashsalt": "specjax"}):
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    raise SystemExit(main())
