"""Measure trained drafters, for EXPERIMENTS.md: `python scripts/report_heads.py --out=DIR`.

    python scripts/report_heads.py --out=DIR --prompts=FILE [--heads=W/heads] [--per_task=N]

Decodes the prompts with each drafter: greedy with batch size 1 against plain decoding (tau, speed,
output comparison; with `--nospeed` in batches), at temperature 0.8 under `coupled` (the same), at
temperature 1 (tau); with `--nocompare` only tau, greedy and at temperature 1. Each run is a process
of its own whose report stays in DIR/cells; finished ones are skipped, so that the same command
resumes. Then DIR/heads.md has tau by task and temperature, speed-up, acceptance by position, and
tau against the tokens trained on, and DIR/cards one model card per head. Drafters are ngram, the
heads (those that come with specjax, without `--heads`) and ngram+eagle3. Exit codes: 0; 1 where a
run failed or its tokens differ from plain decoding's; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import sweep
from lib.child_processes import INTERRUPTED
from lib.model_cards import card, curve, table
from specjax import report
from specjax.cli import command
from specjax.cli.flags import Listed, Parser
from specjax.decoding.options import BATCH_SIZE, FIXED
from specjax.drafters import DRAFT_TOKENS
from specjax.errors import InputError
from specjax.fields import Flag, InputFile, InputFolder, Number, OutputFolder, Text, Whole, optional
from specjax.loading.find_head import SHIPPED, shipped_heads
from specjax.loading.heads.head import read_head
from specjax.loading.load import DEFAULT_MODEL
from specjax.reporting.records import Run, read_report
from specjax.reporting.statistics import OVERALL, figures_by_task, heading, tasks_of

_UNTRAINED = ("ngram",)
_TOGETHER = ("ngram", "eagle3")
"""Shown as a drafter, the first where it has a draft and else the second."""
_CONFIG = "configs/decode_smollm2.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    act = lambda arguments: run(SimpleNamespace(**parser().read(arguments)))  # noqa: E731
    return command.run(act, argv, interrupted=INTERRUPTED)


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/report_heads.py", __doc__)
    add = flags.add_field
    add("out", OutputFolder(), "folder of the report")
    schema = "JSONL in Spec-Bench's schema; else built in"
    add("prompts", optional(InputFile()), schema, default=None)
    add("per_task", optional(Whole(1)), "prompts of a task; else all", default=None)
    kinds = "folder with a checkpoint for each kind; else the shipped"
    add("heads", optional(InputFolder()), kinds, default=None)
    which = "which; else ngram, all heads, ngram+eagle3"
    add("drafters", optional(Listed(Text())), which, default=None)
    add("num_speculative_tokens", DRAFT_TOKENS, "K of a head by itself", default=4)
    add("draft_p_min", optional(Number(0.0, 1.0)), "where a head stops drafting", default=None)
    add("new_tokens", Whole(1), "tokens per answer", default=96)
    add("batch_size", BATCH_SIZE, "of the runs whose speed is not asked for", default=8)
    add("data", Text(empty=True), "for the cards: where prompts come from", default="")
    add("compare", Flag(), "else tau alone, without plain decoding", default=True)
    add("speed", Flag(), "compare greedy runs one by one; else in batches", default=True)
    add("pictures", Flag(), "draw pictures", default=True)
    return flags


def run(options: SimpleNamespace) -> int:
    """Decode what is not decoded yet and write the tables; returns the exit code."""
    out, folders = options.out, _folders(options.heads)
    known = [*_UNTRAINED, *folders]
    both = ["+".join(_TOGETHER)] if set(_TOGETHER) <= set(known) else []
    drafters = options.drafters or [*known, *both]
    for drafter in drafters:
        parts = drafter.split("+")
        if unknown := [part for part in parts if part not in known]:
            raise InputError(
                f"drafters={unknown[0]!r}: there are {', '.join(known)}, and those joined by +"
            )
        if options.heads and len(set(folders).intersection(parts)) > 1:
            raise InputError(f"drafters={drafter!r}: with heads, join one head only")
    heads = {kind: read_head(folder) for kind, folder in folders.items() if kind in drafters}
    cells = [
        cell
        for drafter in drafters
        for fixed, grid in _runs(options, drafter, folders)
        for cell in sweep.make_cells(out, fixed, grid)
    ]
    code = sweep.run_cells(cells)
    done = [cell.report for cell in cells if sweep.finished(cell) is not None]
    paths = report.write(done, out, pictures=options.pictures)
    tables = (out / "report.md").read_text(encoding="utf-8")
    text = "\n".join([tables, *(curve(kind, head) for kind, head in heads.items())])
    texts = {out / "heads.md": text}
    runs = [read_report(path) for path in done]
    for kind, head in heads.items():
        own = [run for run in runs if run.drafter == kind]
        texts[out / "cards" / f"{kind}.md"] = card(head, options.data, _by_task(options, own))
    for folder, text in texts.items():
        folder.parent.mkdir(exist_ok=True)
        folder.write_text(text, encoding="utf-8")
    for path in (*paths, *texts):
        print(f"wrote {path}")
    return code


def _folders(given: Path | None) -> dict[str, Path]:
    """The checkpoint of each kind of head."""
    folder = given or SHIPPED / DEFAULT_MODEL
    if given:
        kinds = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    else:
        kinds = shipped_heads().get(DEFAULT_MODEL, [])
    if not kinds:
        raise InputError(f"heads={str(folder)!r}: no head is there; train one, or name its folder")
    return {kind: folder / kind for kind in kinds if (folder / kind).is_dir()}


def _runs(
    options: SimpleNamespace, drafter: str, folders: Mapping[str, Path]
) -> Iterator[tuple[list[str], dict[str, list[str]]]]:
    """The fixed arguments of a drafter's runs, with the fields that vary and their values."""
    fixed = [f"--config={_CONFIG}", f"--config.sampling.max_new_tokens={options.new_tokens}"]
    if options.prompts:
        fixed.append(f"--config.prompts={options.prompts}")
    if options.per_task:
        fixed.append(f"--config.per_task={options.per_task}")
    trained = [part for part in drafter.split("+") if part in folders]
    if options.heads:
        fixed += [f"--config.drafter.path={folders[part]}" for part in trained]
    grid = {"config.drafter.name": [drafter]}
    if trained and options.draft_p_min is not None:
        grid["config.drafter.draft_p_min"] = [str(options.draft_p_min)]
    length = str(options.num_speculative_tokens) if drafter in folders else FIXED
    grid["config.num_speculative_tokens"] = [length]
    batch = {"config.batch_size": [str(options.batch_size)]}
    alone = {"config.batch_size": ["1"]} if options.speed else batch
    greedy = {"config.sampling.temperature": ["0.0"]}
    coupled = {"config.sampling.temperature": ["0.8"], "config.verify": ["coupled"]}
    sampled = {"config.sampling.temperature": ["1.0"]}
    if options.compare:
        yield [*fixed, "--config.compare=true"], grid | greedy | alone
        yield [*fixed, "--config.compare=true"], grid | coupled | batch
    else:
        yield [*fixed, "--config.compare=false"], grid | greedy | batch
    yield [*fixed, "--config.compare=false"], grid | sampled | batch


def _by_task(options: SimpleNamespace, runs: Sequence[Run]) -> list[str]:
    """Tau of each run, by task."""
    if not runs:
        return []
    entries = [figures_by_task(run) for run in runs]
    tasks = tasks_of(runs)
    rows = [["temperature", "rule", *(heading(task) for task in tasks), "all"]]
    for run, figures in zip(runs, entries, strict=True):
        cells = [figures[task].counts.acceptance_length for task in (*tasks, OVERALL)]
        rule = "greedy" if run.conditions.temperature == 0 else run.config["verify"]
        shown = ["n/a" if one is None else f"{one:.2f}" for one in cells]
        rows.append([f"{run.conditions.temperature:g}", rule, *shown])
    title = f"## Tau by task, K = {options.num_speculative_tokens}, {options.new_tokens} new tokens"
    if options.draft_p_min is not None:
        title += f", draft_p_min = {options.draft_p_min}"
    return [title, "", *table(rows), ""]


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
