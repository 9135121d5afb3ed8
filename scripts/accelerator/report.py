"""What the rows say: the aims, where speculation stops paying, the peer, the pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from accelerator.rows import Rows
from accelerator.sizes import ITEMSIZE, Size, model_shape
from specjax import theory
from specjax.plots import Curve, draw_curves

Row = dict[str, Any]


def device(rows: Rows) -> theory.Chip:
    """The device by its own measurements, as the roofline takes it."""
    row = rows.measured("device")[-1]
    return theory.Chip(
        row["settings"]["device"],
        row["matmul_flops"],
        row["copy_bandwidth"],
        # A device that does not say how much it has is no limit.
        row["memory_bytes"] or sys.float_info.max,
    )


def print_summary(rows: Rows, size: Size, console: Console) -> None:
    """Every table that has rows."""
    if not rows.measured("device"):
        console.print("nothing measured yet")
        return
    chip = device(rows)
    console.print(
        f"{chip.name}: copies {chip.bandwidth / 1e9:,.0f} GB/s (reads and writes), "
        f"multiplies {chip.flops / 1e12:,.1f} TFLOP/s"
    )
    for table in (
        _rounds(rows),
        _speedups(rows),
        _paying(rows, size),
        _kernels(rows),
        _left_out(rows),
        _aims(rows, size),
    ):
        if table.row_count:
            console.print(table)


def _rounds(rows: Rows) -> Table:
    table = _table(
        "A plain round",
        *("model", "batch", "context", "ms", "of copy bandwidth", "loop overhead", "tokens/s"),
        *("T(8)/T(1)", "transformers tokens/s"),
    )
    for row in rows.measured("plain"):
        where = _where(row)
        peers = rows.measured("transformers", **where)
        relative = _relative(rows, where).get(8)
        table.add_row(
            _model(row),
            str(row["batch"]),
            str(row["context"]),
            f"{1e3 * row['round_s']:.2f}",
            f"{row['bandwidth_utilisation']:.0%}",
            f"{row['loop_overhead']:.1%}",
            f"{row['tokens_per_second']:.1f}",
            "" if relative is None else f"{relative:.2f}",
            f"{peers[-1]['tokens_per_second']:.1f}" if peers else "",
        )
    return table


def _speedups(rows: Rows) -> Table:
    table = _table(
        "Speed-up with the simulated drafter",
        *("model", "batch", "context", "acceptance", "tokens a round", "measured", "min..max"),
        *("predicted", "measured/predicted", "rows as plain"),
    )
    for row in rows.measured("speedup"):
        table.add_row(
            _model(row),
            str(row["batch"]),
            str(row["context"]),
            f"{row['acceptance']} ({row['measured_acceptance']:.2f})",
            f"{row['tokens_per_round']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_min']:.2f}..{row['speedup_max']:.2f}",
            f"{row['predicted']:.2f}x",
            f"{row['measured_over_predicted']:.2f}",
            f"{row['identical_rows']} of {row['rows']}",
        )
    return table


def _paying(rows: Rows, size: Size) -> Table:
    table = _table(
        f"The largest measured batch at which {size.num_speculative_tokens} drafts a round pay",
        *("model", "context", "acceptance", "batch", "measured batches"),
    )
    for model, context, acceptance, found in paying(rows.measured("speedup")):
        batches = sorted(found)
        best = [batch for batch in batches if found[batch] > 1]
        table.add_row(
            model,
            str(context),
            str(acceptance),
            str(max(best)) if best else "none",
            ", ".join(f"{batch}: {found[batch]:.2f}x" for batch in batches),
        )
    return table


def paying(rows: Iterable[Row]) -> list[tuple[str, int, float, dict[int, float]]]:
    """(model, context, acceptance, speed-up by batch), of speed-up rows."""
    found: dict[tuple[str, int, float], dict[int, float]] = {}
    for row in rows:
        key = (_model(row), row["context"], row["acceptance"])
        found.setdefault(key, {})[row["batch"]] = row["speedup"]
    return [(*key, batches) for key, batches in sorted(found.items())]


def _kernels(rows: Rows) -> Table:
    table = _table(
        "Ways to read weights and cache, alone",
        *("model", "what", "variant", "batch", "context", "tokens", "ms", "of copy bandwidth"),
        "differs by",
    )
    for row in rows.measured("form") + rows.measured("attention"):
        difference = row.get("max_difference")
        table.add_row(
            _model(row),
            row["kind"],
            row.get("form") or row["variant"],
            str(row["batch"]),
            str(row["context"]),
            str(row["tokens"]),
            f"{1e3 * row['seconds']:.3f}",
            f"{row['bandwidth_utilisation']:.0%}",
            "" if difference is None else f"{difference:.1e}",
        )
    return table


def _left_out(rows: Rows) -> Table:
    table = _table("Without figures", "cells", "status", "first", "reason")
    found: dict[tuple[str, str], list[str]] = {}
    for row, name in rows.without_figures():
        found.setdefault((row["status"], _short(row["reason"])), []).append(name)
    for (status, reason), names in found.items():
        table.add_row(str(len(names)), status, names[0], reason)
    return table


def _short(reason: str) -> str:
    return reason if len(reason) <= 80 else f"{reason[:77]}..."


def _aims(rows: Rows, size: Size) -> Table:
    """The aims of plain and speculative rounds, on the first model of the size."""
    model, config = next(iter(size.models.items()))
    here = {"model": model, "layers": config.num_layers}
    first = {**here, "batch": min(size.batches), "context": min(size.contexts)}
    table = _table(f"Aims, {model} shape", "aim", "wanted", "measured", "where", "met")

    def add(
        name: str, wanted: str, found: list[tuple[float, Row]], worst: Callable, ok: Callable
    ) -> None:
        if not found:
            table.add_row(name, wanted, "not measured", "", "")
            return
        value, row = worst(found, key=lambda pair: pair[0])
        where = f"batch {row['batch']}, context {row['context']}"
        where += f", acceptance {row['acceptance']}" if "acceptance" in row else ""
        where += f" (worst of {len(found)})" if len(found) > 1 else ""
        table.add_row(name, wanted, f"{value:.3f}", where, "yes" if ok(value) else "NO")

    def values(kind: str, field: str, where: Row) -> list[tuple[float, Row]]:
        return [(row[field], row) for row in rows.measured(kind, **where)]

    utilisation = values("plain", "bandwidth_utilisation", first)
    add("plain round / copy bandwidth", ">= 0.80", utilisation, min, lambda x: x >= 0.8)
    overhead = values("plain", "loop_overhead", here)
    add("loop overhead / round", "<= 0.05", overhead, max, lambda x: x <= 0.05)
    efficiency = values("speedup", "measured_over_predicted", here)
    add("speed-up measured / predicted", ">= 0.95", efficiency, min, lambda x: x >= 0.95)
    relative = _relative(rows, first).get(8)
    widths = [] if relative is None else [(relative, first)]
    add("T(8) / T(1)", "<= 1.10", widths, max, lambda x: x <= 1.1)
    return table


def draw(rows: Rows, size: Size, folder: Path) -> list[Path]:
    """The pictures that there are rows for: two a model."""
    if not rows.measured("device"):
        return []
    chip = device(rows)
    written = []
    for model, config in size.models.items():
        kinds = (("speedup", _draw_speedup), ("width", _draw_widths))
        for kind, one in kinds:
            found = rows.measured(kind, model=model)
            if found:
                # Of a model that was cut to what fits, the deepest that was measured.
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
        title=f"{_model(rows[0])}, {chip.name}: {drafted} drafts a round",
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
            title=f"{_model(rows[0])}, {chip.name}: one pass over N tokens a row",
            x_label="N (tokens a row)",
            y_label="T(N) / T(1)",
        )


def _line(rows: list[Row], x: str, y: str, **fields: Any) -> tuple[list, list]:
    """Two fields of the rows that have these values, ordered by the first."""
    chosen = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    pairs = sorted((row[x], row[y]) for row in chosen)
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _between(values: list[int]) -> np.ndarray:
    """Whole numbers from the least to the greatest, at most 64 of them."""
    return np.unique(np.geomspace(min(values), max(values), 64).round().astype(int))


def _relative(rows: Rows, where: Row) -> dict[int, float]:
    """T(N) / T(1) by N."""
    seconds = {row["width"]: row["seconds"] for row in rows.measured("width", **where)}
    return {n: value / seconds[1] for n, value in seconds.items()} if 1 in seconds else {}


def _where(row: Row) -> Row:
    return {name: row[name] for name in ("model", "layers", "batch", "context")}


def _model(row: Row) -> str:
    return f"{row['model']}, {row['layers']} layers"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
