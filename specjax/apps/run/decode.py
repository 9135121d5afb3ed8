"""Decode prompts with drafters, and show acceptance and speed-up.

    python -m specjax.decode --config.prompt="Name three rivers."
    python -m specjax.decode --config.drafter.name=ngram,eagle3,ngram+eagle3

Each prompt is also decoded plainly, to measure the speed-up and to check that the tokens agree.
Several drafters share one plain baseline; an option `drafter.*` applies to the drafters that accept
it. The text shown is that of the first drafter.

Rows are added to the report, a file of JSON lines, as they finish. Its last lines are summaries,
marked "interrupted" if prompts are missing and "refused" if a later turn did not fit. With several
processes, only the first prints and writes the report.

Exit codes: 0; 1 if the output differs from plain decoding by more than rounding explains; 2 for bad
input, non-finite logits or a report that cannot be written; 130 after Ctrl-C, SIGTERM or a closed
terminal; 141 if stdout is closed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args

from jax.sharding import Mesh
from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.mesh_config import open_mesh
from specjax.apps.rows.decode_report import Clock, DrafterRun, summary
from specjax.apps.rows.records import all_exact
from specjax.apps.rows.report_file import ReportFile, check_together
from specjax.apps.rows.statistics import Figures
from specjax.apps.run.conversations import Conversations
from specjax.apps.run.decode_config import (
    ConfigDrafter,
    DecodeConfig,
    load_target,
    make_config_drafter,
    read_decode_config,
)
from specjax.apps.run.decode_run import Decoding
from specjax.apps.run.runner import open_run
from specjax.apps.tuning.weight_bandwidth import memory_bandwidth
from specjax.core.growth.tree_options import TreeKind, TreeOptions
from specjax.core.none import PLAIN_DECODING
from specjax.distributed import processes
from specjax.drafters import TRAINED, drafter_options, option_type
from specjax.engine.outputs import Failure, failure_message
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError, one_line
from specjax.fields import fields_of
from specjax.loading.model import Model
from specjax.loading.texts.questions import digest
from specjax.methods.find_head import included_heads, shipped_heads
from specjax.methods.method import Method
from specjax.methods.registry import METHODS, parts_of
from specjax.sampling import RULES

CONFIG = "decode_smollm2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--list" in argv:
        return command.run(lambda _: print(listing()) or 0, argv)
    return command.run_config(
        lambda config, *, verbose, **_: decode(config, verbose=verbose),
        argv,
        default=CONFIG,
        read=read_decode_config,
        documentation=__doc__,
        source=DecodeConfig,
        flags={
            "verbose": "show all numbers, which docs/reports.md explains",
            "list": "print drafters with their options, rules and sampling fields",
        },
    )


def decode(config: DecodeConfig, *, verbose: bool = False) -> int:
    """Decode the prompts of a config, show the results, and return the command's exit code.

    With `verbose` all numbers are shown, and the expected acceptance is computed. Raises
    InputError.
    """
    mesh = open_mesh(config.mesh, config.distributed, config.written)
    writes = processes.is_first()

    path = check_together(config.report)
    processes.agree({"prompts": digest(config.questions)})
    console = Console(width=None if sys.stdout.isatty() else 100, quiet=not writes)
    screen, clock = Screen(console), Clock()
    model, drafters = _load(config, mesh, screen, clock)
    runs = [
        open_run(config, drafter, made, model, mesh)
        for drafter, made in zip(config.drafters, drafters, strict=True)
    ]
    conditions = runs[0].header.conditions
    screen.say(f"{model.num_params / 1e6:.1f}M parameters, {model.weights}, on {conditions.device}")
    if verbose:
        screen.say(_ends_and_beginning(model))
    screen.legend(config.drafters[0].name)

    file = ReportFile(path, screen.say)
    interrupted, written = False, False
    bandwidth: float | None = None
    conversations = Conversations(
        model,
        config.questions,
        config.sampling,
        config.uses_chat(model),
        num_turns=1 if config.turns == "first" else None,
        max_length=config.options.max_length,
    )
    decoding = Decoding(config, conversations, drafters, runs, screen, clock)
    try:
        for _ in decoding.run(with_expectation=verbose):
            file.add(_new_records(runs))
    except KeyboardInterrupt:
        interrupted = True
    # The first later turn that turned out too long, if any; all other results are kept.
    refused = next(iter(conversations.refused), None)
    try:
        # The report comes first, since the terminal may be closed. If no row has finished, an
        # earlier report is left unchanged.
        if runs[0].rows:
            bandwidth = memory_bandwidth()
            ended = {
                "interrupted": interrupted,
                "refused": refused and one_line(refused),
                "memory_bandwidth": bandwidth,
            }
            ends = [{"record": "summary", **summary(run, clock, **ended)} for run in runs]
            written = file.finish(itertools.chain(_new_records(runs), ends))
    finally:
        title = f"{config.target}, {model.weights}, {conditions.device}, "
        title += f"batch size {conditions.batch_size}{_lossy(config)}"
        compared = functools.partial(_compared, config) if config.compare else None
        screen.results(runs, title, compared, verbose=verbose, memory_bandwidth=bandwidth)
        for run in runs:
            screen.differences(run.rows, run.drafter if len(runs) > 1 else "")
    if written:
        screen.say(f"report: {path}")
    if interrupted:
        count = len(runs[0].rows)
        rows = f"{count} finished row{'' if count == 1 else 's'}"
        screen.say(f"interrupted; {rows} {'are in the report' if written else 'shown above'}")
        return command.INTERRUPTED
    if refused is not None:
        raise refused
    if failed := _failed(conversations, runs):
        raise InputError(failure_message(model, failed))
    if line := others_to_try(model, [drafter.name for drafter in config.drafters]):
        screen.say(line, "dim")
    return 0 if all(all_exact(run.rows) for run in runs) else command.DIFFERENT


def _new_records(runs: Sequence[DrafterRun]) -> Iterator[dict[str, Any]]:
    """Yield what is not in the report yet; it counts as reported from then on."""
    for run in runs:
        yield from run.new_records()


def _load(
    config: DecodeConfig, mesh: Mesh | None, screen: Screen, clock: Clock
) -> tuple[Model, list[ConfigDrafter]]:
    """Return the target and the config's drafters, the same in all processes."""
    begin = time.perf_counter()

    def load() -> tuple[Model, list[ConfigDrafter]]:
        model = load_target(config, mesh)
        return model, [
            make_config_drafter(config, drafter, model, tell=screen.say)
            for drafter in config.drafters
        ]

    with screen.working(f"loading {config.target}"):
        model, drafters = processes.together(load)
        processes.agree({"target": repr(model.config)})
    clock.load_s = time.perf_counter() - begin
    return model, drafters


def _failed(conversations: Conversations, runs: Sequence[DrafterRun]) -> dict[str, Failure]:
    """Return the failures of the rows that ended with an error, by the row's name in messages."""
    return {
        conversations.name(row.question_id, row.turn)
        + (f", with {run.drafter}" if len(runs) > 1 else ""): Failure(
            row.new_tokens, row.text_error
        )
        for run in runs
        for row in run.rows
        if row.finish_reason == "error"
    }


def others_to_try(target: Model, drafters: Sequence[str]) -> str | None:
    """Return a line that says what else may draft for a target, by what it has.

    `drafters` are those of the run. None if one of them is trained: then the user knows of these.
    """
    parts = [part for name in drafters for part in parts_of(name)]
    if any(part in TRAINED for part in parts):
        return None
    heads = included_heads(target)
    reasons = [f"{', '.join(heads)} come with specjax for this target"] if heads else []
    for method in METHODS.values():
        if (own := method.own_head) is not None and own.config(target) is not None:
            heads.append(method.name)
            reasons.append(f"the target has {own.what}")
    if not heads:
        return (
            f"no head comes with specjax for {target.name}: a smaller model with its tokenizer can "
            "draft (drafter.name=draft_model, drafter.path), or a head be trained; docs/faq.md"
            "#which-drafter"
        )
    names = ",".join([*(name for name in drafters if name != PLAIN_DECODING), *heads])
    return f"{'; '.join(reasons)}: compare by --config.drafter.name={names}"


def _ends_and_beginning(model: Model) -> str:
    """Return a line about the tokens that end a sequence and those added to raw text."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return f"ends at {', '.join(map(str, model.ends)) or 'no token'}; no tokenizer"
    ends = ", ".join(f"{tokenizer.token(index)} ({index})" for index in model.ends)
    added = "".join(map(tokenizer.token, tokenizer.encode(""))) or "nothing"
    return f"ends at {ends or 'no token'}; {added} is added to raw text"


def _compared(config: DecodeConfig, figures: Figures) -> str:
    """Return the text in the results about the comparison of a run with plain decoding."""
    if config.lossy:
        return f"not expected: {config.options.verify.name} is lossy"
    if not config.comparable:
        rule = config.options.verify.name
        return f"not expected: {rule} at a temperature has the same distribution only"
    same, rows = figures.identical_rows or 0, figures.compared_rows
    return f"{'yes' if same == rows else 'NO'}, {same} of {rows} rows"


def _lossy(config: DecodeConfig) -> str:
    """Return the note in the title for a rule that changes the output distribution, or ""."""
    return f"; LOSSY: {config.options.verify.name} acceptance" if config.lossy else ""


def _needs(method: Method) -> str:
    """Return what a method needs in addition to the target, for the listing."""
    if not method.needs.weights:
        return method.needs.value
    targets = [target for target, kinds in shipped_heads().items() if method.name in kinds]
    included = f"; included for {', '.join(targets)}" if targets else ""
    return f"{method.needs.value} (path{included})"


def listing() -> str:
    """Return a text that lists drafters with their options, rules and sampling fields."""
    lines = ["drafters (--config.drafter.name=NAME, then --config.drafter.OPTION=VALUE;"]
    lines.append("--help says what each option means):")
    for name, method in METHODS.items():
        summary = inspect.getdoc(method.drafter).splitlines()[0]
        lines.append(f"  {name}: {summary}")
        if name == PLAIN_DECODING:
            continue
        lines.append(f"      {method.usual_length}; needs {_needs(method)}")
        for option, parameter in drafter_options(name).items():
            if option_type(parameter) is not None:
                shown = "" if parameter.default is None else f" = {parameter.default}"
                lines.append(f"      {option}{shown}")
    lines.append(
        "  package.module:function: your own drafter, called as function(target, **options)"
    )
    lines.append("  NAME+NAME, as ngram+eagle3: the first that has a draft, in each row")
    lines.append("  NAME|NAME, as ngram|eagle3: the drafts of both, merged into one tree")
    lines.append("  NAME,NAME: several, each compared with plain decoding")
    others = [name for name in fields_of(TreeOptions) if name != "kind"]
    lines.append("trees (--config.tree.OPTION=VALUE), of drafters that take one:")
    lines.append(f"  kind = {' | '.join(get_args(TreeKind))}; then {', '.join(others)}")
    lines.append("rules (--config.verify=RULE), exact unless they say lossy:")
    lines += [f"  {name}: {rule.description}" for name, rule in RULES.items()]
    lines.append("sampling (--config.sampling.FIELD=VALUE):")
    lines += [f"  {field.name} = {field.default}" for field in fields(SamplingParams)]
    return "\n".join(lines)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
