"""What `specjax.bench` measures, printed and added to the report part by part."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from specjax.cli.bench_config import BenchConfig
from specjax.cli.built_in_prompts import questions_of
from specjax.cli.measure_auto import Cell, Ratio, measure_cells
from specjax.cli.measure_drafter import (
    Comparison,
    compare_with_plain,
    decode_all,
    round_costs_table,
)
from specjax.decoding import prompts
from specjax.decoding.generate import open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import plan_session
from specjax.distributed import processes
from specjax.drafters import LoadedDrafter, make_drafter
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.reporting.decode_report import device_name
from specjax.tuning import costs


@dataclass
class Measured:
    """The report of a run: what is measured so far, in seconds where no unit is named."""

    floor_ms: float | None = None
    rounds: list[dict[str, float]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    auto: list[Cell] = field(default_factory=list)

    def content(self, interrupted: bool) -> dict[str, Any]:
        """As JSON; an interrupted run says so."""
        return asdict(self) | ({"interrupted": True} if interrupted else {})


def measure_all(
    config: BenchConfig,
    console: Console,
    mesh: Mesh | None,
    measured: Measured,
    grew: Callable[[], None],
) -> None:
    """Measure and print every part, added to `measured`; `grew` is called after each addition."""

    def load() -> tuple[Model, Sequence[prompts.Question]]:
        model = load_model(config.target, dtype=config.dtype, mesh=mesh, field="target")
        for layer in config.exit_layers:
            make_drafter("early_exit", model, exit_layer=layer)  # refused before the long work
        for name in config.auto.drafters:
            make_drafter(name, model)
        return model, questions_of(config.prompts)

    model, everything = processes.together(load)
    processes.agree({"prompts": hashlib.sha256(repr(everything).encode()).hexdigest()[:16]})
    questions = prompts.select(everything, per_task=config.per_task)
    fewest = len(questions)
    questions += [question for question in everything if question not in questions]
    ids = [
        prompts.encode_prompt(model, question.first_turn)
        for question in questions[: max(fewest, *config.batch_sizes)]
    ]
    where = device_name(mesh)
    console.print(f"{model.name}, {model.dtype}, {where}, from {fewest} prompts on")
    floor = costs.read_seconds(model.params)
    console.print(f"floor (read {model.num_params:,} weights once): {1e3 * floor:.1f} ms")

    measured.floor_ms = 1e3 * floor
    table = _table(
        "T(width): one pass", "capacity", "B", "width", "ms", "/ T(1)", "/ floor", "rows/s"
    )
    for capacity in config.capacities:
        console.print(f"measuring passes at capacity {capacity} ...")
        for row in round_costs_table(
            model, config.widths, config.batch_sizes, config.committed, capacity
        ):
            measured.rounds.append({"capacity": capacity, **row})
            grew()
            table.add_row(
                str(capacity),
                str(row["batch"]),
                str(row["width"]),
                f"{row['ms']:.1f}",
                f"{row['relative']:.2f}",
                f"{row['floors']:.2f}",
                f"{row['tokens_per_second']:.1f}",
            )
    console.print(table)

    table = _table(
        "Speed-up against plain decoding",
        "drafter",
        "B",
        "tau",
        "tokens/s",
        "plain",
        "speed-up",
        "min..max",
        "predicted",
        "measured/predicted",
        "draft ms",
        "same tokens",
    )
    for one in _comparisons(model, ids, fewest, config, console):
        measured.comparisons.append(one)
        grew()
        console.print(f"  {one.speedup:.2f}x, predicted {one.predicted:.2f}x", highlight=False)
        table.add_row(
            one.drafter,
            str(one.batch),
            f"{one.acceptance_length:.2f}",
            f"{one.tokens_per_second:.1f}",
            f"{one.plain_tokens_per_second:.1f}",
            f"{one.speedup:.2f}x",
            f"{one.speedup_min:.2f}..{one.speedup_max:.2f}",
            f"{one.predicted:.2f}x",
            f"{one.efficiency:.2f}",
            f"{1e3 * one.draft_s:.2f}",
            "yes" if one.identical else "NO",
        )
    console.print(table)

    table = _table(
        "auto against plain decoding: geometric means, 95 % intervals",
        "drafter",
        "B",
        "temperature",
        "tau",
        "draft",
        "tokens/s",
        "plain",
        "decoding",
        "with prefill",
        "same tokens",
    )
    for cell in _auto_cells(model, everything, config, console):
        measured.auto.append(cell)
        grew()
        console.print(f"  {_interval(cell.decoding)}", highlight=False)
        table.add_row(
            cell.drafter,
            str(cell.batch),
            f"{cell.temperature:g}",
            f"{cell.acceptance_length:.2f}",
            f"{cell.mean_draft:.2f}",
            f"{cell.tokens_per_second:.1f}",
            f"{cell.plain_tokens_per_second:.1f}",
            _interval(cell.decoding),
            _interval(cell.whole),
            {None: "", True: "yes", False: "NO"}[cell.identical],
        )
    console.print(table)


def _auto_cells(
    model: Model, questions: Sequence[prompts.Question], config: BenchConfig, console: Console
) -> Iterator[Cell]:
    cells = config.auto
    ids = [
        prompts.encode_prompt(model, question.first_turn)
        for question in prompts.spread(questions, cells.prompts)
    ]
    if not cells.drafters:
        return
    drafters = {name: make_drafter(name, model) for name in cells.drafters}
    for batch, temperature in itertools.product(cells.batch_sizes, cells.temperatures):
        console.print(
            f"measuring auto with {', '.join(drafters)}, batch {batch}, "
            f"temperature {temperature:g} ..."
        )
        yield from measure_cells(
            model,
            ids,
            {"plain, again": None, **drafters},
            batch_size=batch,
            temperature=temperature,
            max_new_tokens=config.max_new_tokens,
            repeats=cells.repeats,
        )


def _interval(ratio: Ratio) -> str:
    text = f"{ratio.mean:.3f} [{ratio.low:.3f}..{ratio.high:.3f}]"
    return text if ratio.resolved else f"{text} unresolved"


def _full_batches(ids: list[list[int]], fewest: int, batch: int) -> list[list[int]]:
    """At least `fewest` prompts, as many as fill their batches; too few are repeated."""
    return list(itertools.islice(itertools.cycle(ids), -(-fewest // batch) * batch))


def _comparisons(
    model: Model,
    ids: list[list[int]],
    fewest: int,
    config: BenchConfig,
    console: Console,
) -> Iterator[Comparison]:
    shared = {"max_new_tokens": config.max_new_tokens, "runs": config.runs}
    most = max((_full_batches(ids, fewest, batch) for batch in config.batch_sizes), key=len)
    plain = plan_session(
        model,
        most,
        requests=SamplingParams(max_new_tokens=config.max_new_tokens),
        options=DecodeOptions(batch_size=min(len(most), max(config.batch_sizes))),
    )
    console.print("recording plain continuations ...")
    recorded = decode_all(plain, open_engine(plain)).token_ids
    lengths = {"ngram": config.ngram_tokens}
    entries: list[tuple[str, LoadedDrafter]] = [("ngram", make_drafter("ngram", model))]
    for acceptance in config.acceptances:
        replay = make_drafter("simulated", model, continuations=recorded, acceptance=acceptance)
        entries.append((f"simulated {acceptance}", replay))
    slower = [
        (f"early_exit {layer}", make_drafter("early_exit", model, exit_layer=layer))
        for layer in config.exit_layers
    ]
    if config.self_draft:
        slower.append(("draft_model = target", make_drafter("draft_model", model, path=model)))
    for batch in config.batch_sizes:
        for label, drafter in entries + (slower if batch == config.batch_sizes[0] else []):
            console.print(f"measuring {label} at batch {batch} ...")
            yield compare_with_plain(
                model,
                _full_batches(ids, fewest, batch),
                drafter,
                label,
                num_speculative_tokens=lengths.get(label, config.num_speculative_tokens),
                batch_size=batch,
                **shared,
            )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
