"""Draws speed-up by batch size and pass time by width, with the measured device's roofline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accelerator.report import Row, device, model_name
from accelerator.rows import Rows
from accelerator.sizes import ITEMSIZE, Size, model_shape
from specjax import theory
from specjax.reporting.plots import Curve, draw_curves


def draw(rows: Rows, size: Size, folder: Path) -> list[Path]:
    """Write two pictures for each model with measured rows; returns their paths."""
    if not rows.measured("device"):
        return []
    chip = device(rows)
    written = []
    for model, config in size.models.items():
        kinds = (("speedup", _draw_speedup), ("width", _draw_widths))
        for kind, one in kinds:
            found = rows.measured(kind, model=model)
            if found:
                # Of a model measured with fewer layers, the largest number that was measured.
                layers = max(row["layers"] for row in found)
                found = [row for row in found if row["layers"] == layers]
                path = folder / f"{kind}_{model}.png"
                shape = model_shape(replace(config, num_layers=layers))
                one(path, found, shape, chip, size)
                written.append(path)
    return written


def _draw_speedup(
    path: Path, rows: list[Row], shape: theory.ModelShape, chip: theory.Chip, size: Size
) -> None:
    drafted = size.num_speculative_tokens
    panels = {}
    for context in sorted({row["context"] for row in rows}):
        here = [row for row in rows if row["context"] == context]
        curves = []
        for acceptance in sorted({row["acceptance"] for row in here}, reverse=True):
            batches, speedups = _line(here, "batch", "speedup", acceptance=acceptance)
            fine = _between(batches)
            ideal = theory.roofline(
                shape,
                chip,
                fine,
                context,
                drafted,
                acceptance,
                itemsize=ITEMSIZE[size.dtype],
            ).speedup
            label = f"acceptance {acceptance}"
            curves.append(Curve(label, batches, speedups, fine.tolist(), np.ravel(ideal).tolist()))
        panels[f"{context} tokens of context"] = curves
    draw_curves(
        path,
        panels,
        title=f"{model_name(rows[0])}, {chip.name}: {drafted} drafts per round",
        x_label="batch size (rows)",
        y_label="speed-up over plain decoding (times)",
        level=1.0,
    )


def _draw_widths(
    path: Path, rows: list[Row], shape: theory.ModelShape, chip: theory.Chip, size: Size
) -> None:
    panels = {}
    for context in sorted({row["context"] for row in rows}):
        here = [row for row in rows if row["context"] == context]
        curves = []
        for batch in sorted({row["batch"] for row in here}):
            widths, seconds = _line(here, "width", "seconds", batch=batch)
            if widths[0] != 1:
                continue
            fine = _between(widths)
            where = {"batch": batch, "context": context, "itemsize": ITEMSIZE[size.dtype]}
            least = theory.pass_seconds(shape, chip, tokens=fine, **where)
            once = theory.pass_seconds(shape, chip, tokens=1, **where)
            relative = [value / seconds[0] for value in seconds]
            ideal = (np.ravel(least) / once).tolist()
            curves.append(Curve(f"batch {batch}", widths, relative, fine.tolist(), ideal))
        if curves:
            panels[f"{context} tokens of context"] = curves
    if panels:
        draw_curves(
            path,
            panels,
            title=f"{model_name(rows[0])}, {chip.name}: one pass over N tokens per row",
            x_label="N (tokens per row)",
            y_label="T(N) / T(1)",
            log_y=True,
        )


def _line(rows: list[Row], x: str, y: str, **fields: Any) -> tuple[list, list]:
    """Two fields of the rows that have these values, ordered by the first."""
    chosen = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    pairs = sorted((row[x], row[y]) for row in chosen)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _between(values: list[int]) -> np.ndarray:
    """Whole numbers from the least to the greatest, at most 64 of them."""
    return np.unique(np.geomspace(min(values), max(values), 64).round().astype(int))
