"""Prints tables of the rows: rounds, speed-ups, break-even batches, kernels, the aims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from accelerator.rows import Rows
from accelerator.sizes import Size
from specjax import theory

Row = dict[str, Any]


def device(rows: Rows) -> theory.Chip:
    """The device as a `Chip` with measured bandwidth and FLOP/s, for the roofline."""
    row = rows.measured("device")[-1]
    return theory.Chip(
        row["settings"]["device"],
        row["matmul_flops"],
        row["copy_bandwidth"],
        # A device of unknown memory has no limit.
        row["memory_bytes"] or sys.float_info.max,
    )


def print_summary(rows: Rows, size: Size, console: Console) -> None:
    """Print every table that has rows."""
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
            model_name(row),
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
        *("model", "batch", "context", "acceptance", "tokens per round", "measured", "min..max"),
        *("predicted", "measured/predicted", "rows as plain"),
    )
    for row in rows.measured("speedup"):
        table.add_row(
            model_name(row),
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
        f"The largest measured batch at which {size.num_speculative_tokens} drafts per round pay",
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
        key = (model_name(row), row["context"], row["acceptance"])
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
            model_name(row),
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


def _relative(rows: Rows, where: Row) -> dict[int, float]:
    """T(N) / T(1) by N."""
    seconds = {row["width"]: row["seconds"] for row in rows.measured("width", **where)}
    return {n: value / seconds[1] for n, value in seconds.items()} if 1 in seconds else {}


def _where(row: Row) -> Row:
    return {name: row[name] for name in ("model", "layers", "batch", "context")}


def model_name(row: Row) -> str:
    """The model of a row, with the layers it had."""
    return f"{row['model']}, {row['layers']} layers"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
