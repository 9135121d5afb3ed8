"""Measure the parts of a round, and the speed-up over plain decoding next to its prediction.

    python -m specjax.bench --config=configs/bench_smollm2.py

Every figure is the median of several warm runs, without compiling. Speed-ups are over plain
decoding in the same loop, with alternating runs. Figures are written to the report as they are
measured, those of "auto" for all drafters of a batch size and temperature at once; it says
"interrupted" until all are there. Exit codes: 0; 2 for bad input, and where the report cannot be
written; 130 after Ctrl-C, SIGTERM or a closed terminal; 141 where stdout is closed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from specjax.cli import command
from specjax.cli.built_in_prompts import questions_of
from specjax.cli.measure_auto import Cell, Ratio, measure_cells
from specjax.cli.measure_drafter import (
    Comparison,
    compare_with_plain,
    decode_all,
    round_costs_table,
)
from specjax.cli.mesh_config import DistributedConfig, MeshConfig, open_mesh
from specjax.decoding import costs, prompts
from specjax.decoding.generate import open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import plan_session
from specjax.distributed import processes, sharding
from specjax.drafters import DRAFT_TOKENS, LoadedDrafter, make_drafter
from specjax.fields import (
    InputFile,
    Items,
    Number,
    OutputFile,
    PathOrName,
    Text,
    Whole,
    optional,
    read_values,
)
from specjax.loading.load import DTYPE, load_model
from specjax.loading.model import Model
from specjax.reporting.decode_report import device_name
from specjax.reporting.report_file import ReportFile, check_writable

_SIZES = Items(Whole(1), least=1, remedy="use whole numbers of at least 1, such as (1, 4)")
_SHARES = Items(Number(0.0, 1.0), remedy="use numbers from 0 to 1, such as (0.6, 0.8)")
_DRAFTERS = Items(Text(), remedy="use names of drafters, such as ('ngram', 'ngram+eagle3')")
_TEMPERATURES = Items(Number(0.0), least=1, remedy="use numbers of at least 0, such as (0.0, 1.0)")
_LAYERS = Items(Whole(1), remedy="use numbers of layers, such as (15, 24)")


@dataclass(frozen=True)
class AutoConfig:
    """The cells in which draft lengths that follow costs are compared with plain decoding."""

    drafters: Annotated[tuple[str, ...], _DRAFTERS]
    batch_sizes: Annotated[tuple[int, ...], _SIZES]
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES]
    prompts: Annotated[int, Whole(1)]
    repeats: Annotated[int, Whole(1)]


@dataclass(frozen=True)
class BenchConfig:
    """What to measure; `configs/bench_smollm2.py` says what each field does."""

    target: Annotated[str, PathOrName()]
    dtype: Annotated[str, DTYPE]
    prompts: Annotated[Path | None, optional(InputFile(pipe=True))]
    per_task: Annotated[int, Whole(1)]
    max_new_tokens: Annotated[int, Whole(1)]
    widths: Annotated[tuple[int, ...], _SIZES]
    batch_sizes: Annotated[tuple[int, ...], _SIZES]
    capacities: Annotated[tuple[int, ...], _SIZES]
    committed: Annotated[int, Whole()]
    num_speculative_tokens: Annotated[int, DRAFT_TOKENS]
    ngram_tokens: Annotated[int, DRAFT_TOKENS]
    acceptances: Annotated[tuple[float, ...], _SHARES]
    exit_layers: Annotated[tuple[int, ...], _LAYERS]
    self_draft: bool
    runs: Annotated[int, Whole(1)]
    auto: AutoConfig
    report: Annotated[Path | None, optional(OutputFile())]
    mesh: MeshConfig
    distributed: DistributedConfig


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


def bench(
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
        "measuring s",
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
            f"{cell.measure_s:.1f}",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def run(config: BenchConfig) -> int:
        mesh = open_mesh(config.mesh, config.distributed, asdict(config))
        writes = processes.is_first()

        def check() -> Path | None:
            return check_writable(config.report) if config.report and writes else None

        path = processes.together(check)
        measured = Measured()
        console = Console(width=None if sys.stdout.isatty() else 120, quiet=not writes)
        with sharding.use(mesh), ReportFile(path, measured.content) as file:
            bench(config, console, mesh, measured, file.grew)
            file.finish()
        return 0

    read = functools.partial(read_values, BenchConfig)
    return command.run_config(run, argv, default="bench_smollm2", read=read, documentation=__doc__)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
