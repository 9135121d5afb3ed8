"""Measure, print and report the parts of `specjax.bench` one after another."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.apps.command_line.console import Screen
from specjax.apps.rows.compare_outputs import Difference
from specjax.apps.rows.decode_report import PLAIN, device_name
from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.report_file import ReportFile
from specjax.apps.rows.speedups import Speedup
from specjax.apps.rows.statistics import noise_remark
from specjax.apps.run.bench_config import BenchConfig
from specjax.apps.run.built_in_prompts import questions_of
from specjax.apps.run.conversations import Conversations
from specjax.apps.run.decode_config import has_chat_template, load_target
from specjax.apps.run.predicted_speedup import measure_round_costs
from specjax.apps.run.runner import Program, Way, check_answered, in_turn, turn_order
from specjax.apps.tuning import measure_costs
from specjax.apps.tuning.weight_bandwidth import memory_bandwidth, pass_bytes
from specjax.core.parameter_sizes import megabytes
from specjax.distributed import processes
from specjax.drafters import LoadedDrafter, make_drafter
from specjax.engine.generate import Generation, open_engine
from specjax.engine.options import AUTO, DecodeOptions
from specjax.engine.requests import SamplingParams, groups
from specjax.files.log import share_logger
from specjax.loading.model import Model
from specjax.loading.texts.questions import Question, digest, spread

_CONTROL = "plain, again"
"""The name of plain decoding by another engine; its ratio shows the noise of the machine."""
_WIDEST = 1000
"""The maximum number of columns of a table that is not printed on a terminal."""
_PASS_COLUMNS: Mapping[str, Callable[[Mapping[str, float]], str]] = {
    "capacity": lambda row: str(row["capacity"]),
    "batch": lambda row: str(row["batch"]),
    "width": lambda row: str(row["width"]),
    "ms": lambda row: f"{row['ms']:.1f}",
    "/ T(1)": lambda row: f"{row['relative']:.2f}",
    "weights, GB/s": lambda row: f"{row['weight_bandwidth'] / 1e9:.3g}",
    "of memory": lambda row: f"{row['bandwidth_share']:.0%}",
    "rows/s": lambda row: f"{row['tokens_per_second']:.1f}",
}
_SPEEDUP_COLUMNS: Mapping[str, Callable[[Speedup], str]] = {
    "drafter": lambda row: row.drafter,
    "draft tokens": lambda row: str(row.num_speculative_tokens),
    "batch": lambda row: str(row.batch),
    "temperature": lambda row: f"{row.temperature:g}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    "plain": lambda row: f"{row.plain_tokens_per_second:.1f}",
    "speed-up": lambda row: _speedup(row),
    "tokens per pass": lambda row: f"{row.acceptance_length:.2f}",
    "same tokens": lambda row: {None: "", True: "yes", False: "NO"}[row.identical],
}
_AUTO_COLUMNS: Mapping[str, Callable[[Speedup], str]] = {
    "passes with a draft": lambda row: (
        f"{row.share_drafted:.0%}" if row.num_speculative_tokens == AUTO else ""
    ),
}
"""The additional column of the table of speed-ups if some draft lengths are `auto`."""
_MORE_COLUMNS: Mapping[str, Callable[[Speedup], str]] = {
    "drafted per pass": lambda row: f"{row.mean_draft:.2f}",
    "with prefill": lambda row: str(row.speedup_with_prefill),
    "predicted": lambda row: "" if row.predicted is None else f"{row.predicted:.2f}",
    "measured/predicted": lambda row: "" if row.efficiency is None else f"{row.efficiency:.2f}",
}
"""The additional columns of the table of speed-ups with --verbose."""


def measure_all(
    config: BenchConfig,
    console: Console,
    mesh: Mesh | None,
    report: ReportFile,
    *,
    verbose: bool = False,
) -> None:
    """Measure and print every part, adding records to the report as they are measured.

    With `verbose` the table of speed-ups also has `_MORE_COLUMNS`.
    """

    def load() -> tuple[Model, Sequence[Question]]:
        model = load_target(config, mesh)
        for name in config.drafters:
            make_drafter(name, model)  # raises InputError before the long work
        return model, questions_of(config.prompts)

    screen = Screen(console)
    with screen.working(f"loading {config.target}"):
        model, questions = processes.together(load)
    processes.agree({"prompts": digest(questions)})
    where = device_name(mesh)
    console.print(f"{model.name}, {model.weights}, {where}")
    with screen.working("measuring memory bandwidth"):
        bandwidth = memory_bandwidth()
    console.print(
        f"a plain pass reads {megabytes(pass_bytes(model))} of weights, at least "
        f"{1e3 * pass_bytes(model) / bandwidth:.1f} ms at the {bandwidth / 1e9:.3g} GB/s that this "
        "machine's memory gives"
    )
    header = {"target": model.name, "dtype": model.weights, "device": where}
    report.add([{"record": "bench", **header, "memory_bandwidth": bandwidth}])

    passes = []
    for row in _passes(model, config, bandwidth, screen):
        passes.append(row)
        report.add([{"record": "pass", **row}])
    _print_table(console, "T(width): one pass", _PASS_COLUMNS, passes)
    speedups = []
    for speedup in _speedups(model, questions, config, screen):
        speedups.append(speedup)
        report.add([{"record": "speedup", **asdict(speedup), "efficiency": speedup.efficiency}])
        console.print(f"  {speedup.drafter}: {_speedup(speedup)}", highlight=False)
    title = "Speed-up over plain decoding: geometric means, 95 % intervals"
    columns = {**_SPEEDUP_COLUMNS, **(_MORE_COLUMNS if verbose else {})}
    if AUTO in config.num_speculative_tokens:
        columns |= _AUTO_COLUMNS
    _print_table(console, title, columns, speedups)


def _passes(
    model: Model, config: BenchConfig, bandwidth: float, screen: Screen
) -> Iterator[dict[str, float]]:
    """Yield a record of each pass: T(width), its ratio to T(1), and the weights read per second.

    `bandwidth` is what the machine's memory moves in bytes per second.
    """
    for capacity, batch in itertools.product(config.capacities, config.batch_sizes):
        with screen.working(f"measuring passes at capacity {capacity}, batch {batch}", timed=True):
            seconds = measure_costs.widths_seconds(
                model.architecture,
                model.params,
                config.widths,
                batch=batch,
                committed=config.committed,
                capacity=capacity,
            )
        for width, value in seconds.items():
            yield {
                "capacity": capacity,
                "batch": batch,
                "width": width,
                "ms": 1e3 * value,
                "relative": value / seconds[config.widths[0]],
                "weight_bandwidth": (read := pass_bytes(model, batch * width) / value),
                "bandwidth_share": read / bandwidth,
                "tokens_per_second": batch / value,
            }


def _speedups(
    model: Model, questions: Sequence[Question], config: BenchConfig, screen: Screen
) -> Iterator[Speedup]:
    """Yield the speed-up of each drafter, and of plain decoding over itself as a control."""
    chosen = spread(questions, config.num_prompts)
    drafters = {name: make_drafter(name, model) for name in config.drafters}
    if not drafters:
        return
    for length, batch, temperature in itertools.product(
        config.num_speculative_tokens, config.decoded_batch_sizes, config.temperatures
    ):
        doing = (
            f"measuring {', '.join(drafters)}: num_speculative_tokens {length}, batch {batch}, "
            f"temperature {temperature:g}"
        )
        options = DecodeOptions(num_speculative_tokens=length, batch_size=batch)
        # Rows have equal lengths, since sampled rows would end at different lengths in each way of
        # decoding, and slots that stay empty until the last row ends would make it look slow.
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=config.max_new_tokens, ignore_eos=True
        )
        with screen.working(doing, timed=True):
            measured = measure_speedups(
                model, chosen, {_CONTROL: None, **drafters}, options, sampling, config.runs
            )
        yield from measured


def measure_speedups(
    model: Model,
    questions: Sequence[Question],
    drafters: Mapping[str, LoadedDrafter | None],
    options: DecodeOptions,
    sampling: SamplingParams,
    repeats: int,
) -> list[Speedup]:
    """Decode first turns plainly and with each of `drafters`; return a result for each drafter.

    A drafter of None is plain decoding by another engine; the distance of its ratio from 1 shows
    how reliable ratios are on this machine.

    Every repeat decodes a batch in all ways in turn (`turn_order`), after one more as a warm-up.
    All engines exist at once, each with its caches. Questions are repeated to fill the last batch.
    Raises InputError if a row fails.
    """
    count = -(-len(questions) // options.batch_size) * options.batch_size
    questions = list(itertools.islice(itertools.cycle(questions), count))
    chat = has_chat_template(model)
    conversations = Conversations(model, questions, sampling, chat, num_turns=1)
    ways = []
    for name, drafter in {PLAIN: None, **drafters}.items():
        of_way = options if drafter is not None else options.without_drafts()
        plan = conversations.plan(drafter, of_way)
        ways.append(Way(name, Program(plan, open_engine(plan))))
    plain, *others = ways
    batches, log = groups(range(count), options.batch_size), share_logger("decoding")
    rows: dict[Way, list[DecodedRow]] = defaultdict(list)
    units = list(itertools.product(range(repeats + 1), batches))
    for number, (repeat, batch) in enumerate(units):
        order, results = [ways[way] for way in turn_order(len(ways), repeat)], {}
        for way, (answers,) in in_turn(conversations, batch, order, Way.decode):
            check_answered(conversations, way, [answers])
            results[way] = answers
            log((number + len(results) / len(ways)) / len(units))
        if repeat == 0:
            continue
        baseline = results[plain].result
        for way in others:
            same = None if sampling.temperature else _same_tokens(results[way].result, baseline)
            rows[way] += results[way].rows(way.name, number, questions, baseline, same)
    measured = []
    for way in others:
        predicted = draft_s = None
        if drafters[way.name] is not None and options.num_speculative_tokens != AUTO:
            requests = conversations.turn(0, dict.fromkeys(range(count), ())).requests
            parts = measure_round_costs(way.plan, requests, sampling.max_new_tokens)
            predicted, draft_s = parts.speedup_of(rows[way]), parts.draft_s
        conditions = (options.num_speculative_tokens, options.batch_size, sampling.temperature)
        measured.append(Speedup.of(rows[way], *conditions, predicted, draft_s))
    return measured


def _same_tokens(result: Generation, plain: Generation) -> list[Difference | None]:
    """Return None for each row that equals plain decoding, for others a difference unexamined."""
    rows = zip(result.token_ids, plain.token_ids, strict=True)
    return [None if ours == theirs else Difference(()) for ours, theirs in rows]


def _speedup(row: Speedup) -> str:
    """Return a speed-up with its interval, and a remark if it is more than is possible."""
    remark = noise_remark(row.speedup.mean, row.possible_speedup)
    return f"{row.speedup} ({remark})" if remark else str(row.speedup)


def _print_table(
    console: Console, title: str, columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]
) -> None:
    """Print a table without truncating it, folding its cells on a terminal only."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row)) for cell in columns.values()))
    if not console.is_terminal:
        table.width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    console.print(table, crop=False)
