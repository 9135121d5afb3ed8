"""What trained drafters do, for EXPERIMENTS.md: `python scripts/report_heads.py --out=DIR`.

    python scripts/report_heads.py --out=DIR --prompts=FILE [--heads=W/heads] [--per_task=N]

Decodes the prompts with each drafter: greedy with batch size 1 against plain decoding (tau, speed,
identity), at temperature 0.8 under `coupled` (identity), at temperature 1 (tau); with `--nocompare`
only tau, greedy and at temperature 1. Each run is a process of its own whose report stays in
DIR/cells; finished ones are skipped, so that the same command goes on where it was stopped. Then
DIR/heads.md has tau by task and temperature, speed-up, acceptance by position, and tau against the
tokens trained on, and DIR/cards a model card a head. Without `--heads` the drafters are those that
come with specjax. Exit codes: 0; 1 where a run failed or its tokens differ from plain decoding's; 2
for bad input; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import sweep
from absl import flags
from reproduce_heads import TRAINERS

from specjax import frontdoor, report
from specjax.errors import InputError, one_line
from specjax.fields import dotted
from specjax.heads.files import SHIPPED, shipped_heads
from specjax.heads.head import Head, read_head
from specjax.models.loading import DEFAULT_MODEL
from specjax.report_figures import OVERALL, figures_by_task, heading, tasks_of
from specjax.report_reading import read_report
from specjax.report_runs import Run

_UNTRAINED = ("ngram",)
_CONFIG = "configs/decode_smollm2.py"
_ROOT = Path(__file__).parent.parent
_TRAINERS = {**TRAINERS, "medusa2": ("train.medusa", "configs/train_medusa2.py")}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    act = lambda arguments: run(_options(arguments))  # noqa: E731
    return frontdoor.command(act, argv, __doc__, interrupted=sweep.INTERRUPTED)


def _options(argv: Sequence[str]) -> Any:
    values = flags.FlagValues()
    own = {"flag_values": values}
    flags.DEFINE_string("out", None, "Folder of the report.", **own)
    flags.DEFINE_string("prompts", None, "JSONL in Spec-Bench's schema; else built in.", **own)
    flags.DEFINE_integer("per_task", None, "Prompts of a task; else all.", **own)
    flags.DEFINE_string("heads", None, "Folder with a checkpoint a kind; else the shipped.", **own)
    flags.DEFINE_list("drafters", None, "Which; else ngram and all heads.", **own)
    flags.DEFINE_integer("num_speculative_tokens", 4, "K of the heads.", **own)
    flags.DEFINE_integer("new_tokens", 96, "Tokens an answer.", **own)
    flags.DEFINE_integer("batch_size", 8, "Of the runs whose speed is not asked for.", **own)
    flags.DEFINE_string("data", "", "For the cards: where prompts come from.", **own)
    flags.DEFINE_bool("compare", True, "Else tau alone, without plain decoding.", **own)
    flags.DEFINE_bool("pictures", True, "Draw pictures.", **own)
    try:
        rest = values(["report_heads", *argv])[1:]
    except flags.Error as error:
        raise InputError(f"{one_line(error)}; see --help") from None
    if rest:
        raise InputError(f"{rest[0]!r} is not understood; see --help")
    if not values.out:
        raise InputError("out is missing: pass --out=DIR, the folder of the report")
    return values


def run(options: Any) -> int:
    """Decode what is not decoded yet and write the tables; returns the exit code."""
    out, places = Path(options.out), _places(options.heads)
    drafters = options.drafters or [*_UNTRAINED, *places]
    if unknown := [one for one in drafters if one not in (*_UNTRAINED, *places)]:
        there = ", ".join((*_UNTRAINED, *places))
        raise InputError(f"drafters={unknown[0]!r}: there are {there}")
    heads = {kind: read_head(place) for kind, place in places.items() if kind in drafters}
    cells = [
        cell
        for drafter in drafters
        for fixed, grid in _runs(options, drafter, places.get(drafter))
        for cell in sweep.make_cells(out, fixed, grid)
    ]
    code = sweep.run_cells(cells)
    done = [cell.report for cell in cells if sweep.finished(cell) is not None]
    paths = report.write(done, out, pictures=options.pictures)
    told = (out / "report.md").read_text(encoding="utf-8")
    text = "\n".join([told, *(_curve(kind, head) for kind, head in heads.items())])
    texts = {out / "heads.md": text}
    runs = [read_report(path) for path in done]
    for kind, head in heads.items():
        own = [run for run in runs if run.drafter == kind]
        texts[out / "cards" / f"{kind}.md"] = _card(options, head, own)
    for place, text in texts.items():
        place.parent.mkdir(exist_ok=True)
        place.write_text(text, encoding="utf-8")
    for path in (*paths, *texts):
        print(f"wrote {path}")
    return code


def _places(given: str | None) -> dict[str, Path]:
    """The checkpoint of each kind of head."""
    folder = Path(given).expanduser() if given else SHIPPED / DEFAULT_MODEL
    if given:
        kinds = [path.name for path in sorted(folder.iterdir())] if folder.is_dir() else []
    else:
        kinds = shipped_heads().get(DEFAULT_MODEL, [])
    if not kinds:
        raise InputError(f"heads={str(folder)!r}: no head is there; train one, or name its folder")
    return {kind: folder / kind for kind in kinds if (folder / kind).is_dir()}


def _runs(
    options: Any, drafter: str, place: Path | None
) -> Iterator[tuple[list[str], dict[str, list[str]]]]:
    """The arguments of a drafter's runs, and what tells them apart."""
    fixed = [f"--config={_CONFIG}", f"--config.sampling.max_new_tokens={options.new_tokens}"]
    if options.prompts:
        fixed.append(f"--config.prompts={Path(options.prompts).expanduser()}")
    if options.per_task:
        fixed.append(f"--config.per_task={options.per_task}")
    if place is not None and options.heads:
        fixed.append(f"--config.drafter.path={place}")
    grid = {"config.drafter.name": [drafter]}
    if drafter != "ngram":
        grid["config.num_speculative_tokens"] = [str(options.num_speculative_tokens)]
    alone = {"config.batch_size": ["1"]}
    batch = {"config.batch_size": [str(options.batch_size)]}
    greedy = {"config.sampling.temperature": ["0.0"]}
    coupled = {"config.sampling.temperature": ["0.8"], "config.verify": ["coupled"]}
    sampled = {"config.sampling.temperature": ["1.0"]}
    if options.compare:
        yield [*fixed, "--config.compare=true"], grid | greedy | alone
        yield [*fixed, "--config.compare=true"], grid | coupled | batch
    else:
        yield [*fixed, "--config.compare=false"], grid | greedy | batch
    yield [*fixed, "--config.compare=false"], grid | sampled | batch


def _card(options: Any, head: Head, runs: Sequence[Run]) -> str:
    """A head's model card."""
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    lines = [
        f"# {head.kind} for {head.target.name}",
        "",
        f"{size / 1e6:.2f} million parameters in half precision, logits over "
        f"{head.config.draft_vocab_size} of {head.target.vocab_size} tokens. The target's "
        "embedding, and its head where the drafter has none, are read from the target.",
        "",
        *_training(options, head),
        "- Licence: Apache-2.0, as the target's.",
        "",
    ]
    if runs:
        lines += [*_by_task(options, runs), ""]
    return "\n".join([*lines, _curve(head.kind, head)])


def _training(options: Any, head: Head) -> list[str]:
    """What a head was trained on, and by which commands."""
    stages = _stages(head)
    if not stages:
        return ["- How it was trained is not recorded."]
    data = stages[-1]["data"]
    tokens, steps = (sum(stage[name] for stage in stages) for name in ("tokens", "step"))
    return [
        f"- Data: {data['conversations']} conversations, {data['tokens']} tokens, of which "
        f"{data['labels']}, written by the target itself, are learned from.",
        *([f"  {options.data}"] if options.data else []),
        f"- Trained on {tokens / 1e6:.2f} million tokens in {steps} steps, from the target's own "
        "weights where they fit, by these commands (from the target alone, data included: "
        f"`python scripts/reproduce_heads.py --workdir=W --kinds={head.kind} --install`):",
        "",
        "```",
        *(_command(stages, number) for number in range(len(stages))),
        "```",
        "",
    ]


def _stages(head: Head) -> list[dict[str, Any]]:
    """The training facts of the runs that led to a head, the first one first."""
    stages, about = [], head.training
    # A head that was not trained here brings no facts, or others.
    while about.keys() >= {"method", "data", "config", "step", "tokens"}:
        stages.insert(0, about)
        about = about.get("earlier", {})
    return stages


def _command(stages: Sequence[dict[str, Any]], number: int) -> str:
    """What a stage was called with: the fields that it records and its config file has not."""
    about = stages[number]
    if about["method"] not in _TRAINERS:
        return f"# with a method of one's own, {about['method']}"
    module, file = _TRAINERS[about["method"]]
    spec = importlib.util.spec_from_file_location("config", _ROOT / file)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    usual = dotted(json.loads(config.get_config().to_json()))
    sources = ",".join(about["data"]["sources"])
    words = [f"python -m {module} --config={file}", f"--config.data={sources}"]
    if number:
        words.append(f"--config.start_from=EXPORT_{number}")
    words.append(f"--config.workdir=W_{number + 1}")
    for name, value in dotted(about["config"]).items():
        unset = value is None or (name == "decay_steps" and value == about["config"]["steps"])
        if not unset and usual.get(name) != value:
            value = tuple(value) if isinstance(value, list) else value
            words.append(shlex.quote(f"--config.{name}={value}"))
    return " \\\n    ".join(words)


def _by_task(options: Any, runs: Sequence[Run]) -> list[str]:
    """Tau of each run, by task."""
    entries = [figures_by_task(run) for run in runs]
    tasks = tasks_of(runs)
    rows = [["temperature", "rule", *(heading(task) for task in tasks), "all"]]
    for run, figures in zip(runs, entries, strict=True):
        cells = [figures[task].counts.acceptance_length for task in (*tasks, OVERALL)]
        rule = "greedy" if run.conditions.temperature == 0 else run.config["verify"]
        shown = ["n/a" if one is None else f"{one:.2f}" for one in cells]
        rows.append([f"{run.conditions.temperature:g}", rule, *shown])
    title = f"## Tau by task, K = {options.num_speculative_tokens}, {options.new_tokens} new tokens"
    return [title, "", *_table(rows)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + "---:|" * len(rows[0])
    told = ["| " + " | ".join(row) + " |" for row in rows]
    return [told[0], rule, *told[1:]]


def _curve(kind: str, head: Head) -> str:
    """A head's evaluations while it was trained, on held-out conversations."""
    lines = [f"## {kind}: tau against tokens", ""]
    curve, before = [], 0
    for stage in _stages(head):
        curve += [{**row, "tokens": before + row["tokens"]} for row in stage.get("curve", [])]
        before += stage["tokens"]
    if not curve:
        return "\n".join([*lines, "Nothing was evaluated while it was trained.", ""])
    names = [name for name in curve[-1] if name.startswith(("tau", "acc_pos"))]
    lines += [
        "On held-out conversations, by their own context (`tau_sim`, accuracies) and decoded "
        "(`tau`)." + (" Those of a later run's data are others." if len(_stages(head)) > 1 else ""),
        "",
    ]
    rows = [["tokens", *names]]
    for row in curve:
        cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
        rows.append([f"{row['tokens'] / 1e6:.2f}M", *cells])
    return "\n".join([*lines, *_table(rows), ""])


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    frontdoor.use_compilation_cache()
    raise SystemExit(main())
