"""A training run from its config: set-up, training, export; the `main` of every method."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from specjax.apps.command_line import command
from specjax.apps.rows import decode_report
from specjax.distributed import folder_lock, processes
from specjax.files import folders
from specjax.files.path_checks import output_folder
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.hub import DEFAULT_MODEL
from specjax.methods.saved_heads import save_head
from train.data import shipped
from train.data.combined_datasets import split_names
from train.methods.method import Method
from train.run import checkpoints, loop
from train.run import workdir as files
from train.run.config import OwnConfig, read_training_config
from train.run.evaluate import Evaluation, held_out_prompts, tau_name
from train.run.metrics import MetricsWriter
from train.run.setup import MakeMethod, Setup, set_up
from train.run.sharding import gathered
from train.run.step import Program

_PROMPT_TOKENS = 512
"""The maximum length of prompts that are decoded, to keep evaluations short."""
_MORE_DATA = (
    "More data: python -m train.generate, then --config.data=build/generate_smollm2/responses and "
    "a new --config.workdir"
)
_LEARNED = {
    "loss": "loss",
    "tau": "tau (tokens per target pass; plain decoding has 1) when decoding greedily",
}
"""The numbers, with labels, that are compared between a run's first and last evaluation."""


def main(
    make_method: MakeMethod[OwnConfig],
    kind: type[OwnConfig],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a training command with `argv`, by default the process's arguments; return its exit code.

    `make_method(target, vocabulary, config)` returns the method, and `kind` is its config class.
    `--help` prints the documentation of the method's module.
    """
    return command.run_config(
        lambda config: run(config, make_method),
        argv,
        default=kind.DEFAULT,
        read=functools.partial(read_training_config, kind),
        documentation=inspect.getdoc(inspect.getmodule(make_method)),
        source=kind,
    )


def run(
    config: OwnConfig, make_method: MakeMethod[OwnConfig], console: Console | None = None
) -> int:
    """Train according to a config and export the result; return the command's exit code.

    `make_method(target, vocabulary, config)` returns the training method. The same call resumes an
    interrupted run. Raises InputError.
    """
    begin = time.perf_counter()
    root, where = output_folder("workdir", config.workdir), f"workdir={config.workdir!r}"
    console = console or Console(width=None if sys.stdout.isatty() else 160)

    def tell(line: str) -> None:
        console.print(Text(line, "dim"), soft_wrap=True)

    setup = set_up(config, make_method, tell)
    prompts = _prompts(setup)
    program = setup.program()
    with folder_lock.hold(root, files.KIND, where):
        workdir = files.open_workdir(root, setup.record)
        return _train(setup, prompts, program, workdir, console, begin)


def _train(
    setup: Setup,
    prompts: list[list[int]],
    program: Program,
    workdir: files.Workdir,
    console: Console,
    begin: float,
) -> int:
    config, method, mesh = setup.config, setup.method, setup.mesh
    processes.together(lambda: _check_exports(method, workdir) if processes.is_first() else None)
    progress = loop.Progress()
    if saved := checkpoints.last_checkpoint(workdir):
        program, progress = loop.resumed(program, saved)
    files.truncate_metrics(workdir, progress.step)

    quiet = not processes.is_first()
    with MetricsWriter(workdir, console, config.loop.steps, progress.step, quiet) as writer:
        _introduce(writer, setup, program.state.params)
        if saved and saved.damaged:
            writer.say(f"the checkpoint of step {saved.damaged[0]} is damaged", "yellow")
        is_finished = progress.step >= config.loop.steps
        if progress.step and not is_finished:
            writer.say(f"resuming after step {progress.step}, {progress.tokens} tokens")
        if config.eval.prompts and not prompts:
            writer.say("no prompt is held out, or none fits: nothing is decoded for a measured tau")
        evaluation = Evaluation(
            method=method,
            program=program,
            target=setup.target,
            target_params=setup.target_params,
            held_out=setup.held_out,
            prompts=prompts,
            config=config.eval,
            writer=writer,
        )

        def evaluate(params: Any, step: int, last: bool) -> dict[str, float]:
            numbers = evaluation(params, step, last)
            metadata, name = setup.metadata(step, progress.tokens), _compared_tau(setup)
            tau = numbers.get(f"eval/{name}")
            _keep_best(method, params, mesh, metadata, workdir, tau, name)
            return numbers

        result = loop.train(
            program,
            setup.target_params,
            setup.feed,
            config.loop,
            config.eval,
            workdir,
            writer,
            progress,
            evaluate,
        )
        if result.step:
            metadata = setup.metadata(result.step, result.tokens)
            metadata["curve"] = files.learning_curve(workdir)
            params = gathered(result.state.result, mesh)
            if result.reason == loop.DONE:
                params = _calibrated(setup, params, evaluation)
            _export(method, params, metadata, workdir)
        seconds = None if is_finished else time.perf_counter() - begin
        return _end(writer, setup, workdir, result, seconds)


def _keep_best(
    method: Method,
    params: Any,
    mesh: Mesh | None,
    metadata: dict[str, Any],
    workdir: files.Workdir,
    tau: float | None,
    name: str = "tau",
) -> None:
    """Write the head to `workdir.best` if no earlier evaluation had as large a decoded tau.

    `name` is that of the tau in evaluations, and `mesh` that of `params`. A loss may still fall
    when tau no longer rises. Heads of targets that are trained along are left out, since they are
    of no use without them.
    """
    if tau is None or not metadata["step"] or method.head is None or method.trains_target:
        return
    curve = files.learning_curve(workdir) if processes.is_first() else []
    earlier = [row[name] for row in curve if row["step"] and name in row]
    # The first process alone has the file.
    if processes.from_first(tau > max(earlier, default=0.0)):
        head = method.head(gathered(params, mesh), {**metadata, "tau": tau})
        save_head(head, workdir.best, overwrite=True)


def _compared_tau(setup: Setup) -> str:
    """Return the name of the tau by which heads of a run are compared.

    It is that of the first temperature, at which all evaluations decode.
    """
    return tau_name(next(iter(setup.config.eval.temperatures), 0.0))


def _calibrated(setup: Setup, params: Any, evaluation: Evaluation) -> Any:
    """Return the parameters to export, calibrated on held-out data if the method does that.

    Several processes, each of which has a part of the data only, leave them as they are.
    """
    calibrate, held_out = setup.method.calibrate, setup.held_out
    if calibrate is None or held_out is None or jax.process_count() > 1:
        return params
    batches = (
        # Micro-batches are rows like others here.
        jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        for batch in evaluation.batches(held_out)
    )
    params, numbers = calibrate(params, setup.target_params, batches)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    evaluation.writer.say(f"calibrated on held-out conversations: {shown}")
    return params


def _check_exports(method: Method, workdir: files.Workdir) -> None:
    """Raise InputError if the export at the end of the run could not be written."""
    found = [*_exports(method, workdir).items()]
    if method.head is not None and not method.trains_target:
        found.append(("drafter", workdir.best))
    for kind, directory in found:
        folders.check_replaceable(directory, kind, str(directory))


def _exports(method: Method, workdir: files.Workdir) -> dict[str, Path]:
    """Return the directories of the head and the model that the method exports, by name."""
    return {
        "head": {"drafter": workdir.export},
        "both": {"drafter": workdir.export / "head", "model": workdir.export / "target"},
        "model": {"model": workdir.export},
    }[method.exports]


def _export(method: Method, params: Any, metadata: dict[str, Any], workdir: files.Workdir) -> None:
    where = _exports(method, workdir)
    if "drafter" in where:
        save_head(method.head(params, metadata), where["drafter"], overwrite=True)
    if "model" in where:
        save_checkpoint(method.model(params), where["model"], overwrite=True)


def _prompts(setup: Setup) -> list[list[int]]:
    data, evaluations = setup.feed.source, setup.config.eval
    room = min(_PROMPT_TOKENS, setup.target.config.max_positions - evaluations.new_tokens)
    chosen = np.flatnonzero(data.validation)
    return held_out_prompts(data, chosen, evaluations.prompts, room)


def _introduce(writer: MetricsWriter, setup: Setup, params: Any) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    steps, packing, shape = setup.config.loop.steps, setup.feed.packing, setup.feed.shape
    rows, tokens = len(packing.rows(0)), packing.tokens
    source = "stored" if shape.features else "computed in the step"
    stored = setup.feed.source.feature_names
    lacking = [name for name in setup.method.features if name not in stored]
    if stored and lacking and setup.config.features == "auto":
        source = f"{source}, since the data has no {', '.join(lacking)}"
    trained = "trained along" if setup.method.trains_target else "frozen"
    writer.say(
        f"{setup.method.name} for {setup.target.name} ({setup.target.num_params / 1e6:.1f}M "
        f"parameters, {trained}): {count / 1e6:.2f}M parameters, on "
        f"{decode_report.device_name(setup.mesh)}, products in {setup.products}"
    )
    writer.say(
        f"{packing.conversations} conversations, {tokens} tokens, in {rows} rows of "
        f"{shape.tokens}, {packing.fill_rate():.1%} full; {packing.left_out} without a label left "
        f"out; features {source}"
    )
    least, lengths = setup.method.least_tokens, setup.feed.source.lengths
    if short := int((lengths < least).sum()):
        writer.say(
            f"{short} of all {len(lengths)} conversations have fewer than {least} tokens: too few "
            "for a label of the last draft"
        )
    epochs = steps * shape.rows / rows
    writer.say(
        f"{steps} steps of {shape.rows} rows: {epochs:.3g} epochs, about "
        f"{tokens * epochs:,.0f} tokens"
    )
    if _shipped_alone(setup.config.data):
        writer.say(
            f"data={shipped.NAME} is small: enough to see a drafter learn. {_MORE_DATA}", "yellow"
        )
    if setup.held_out is None:
        writer.say("no conversation is held out: losses are of the training data only")


def _end(
    writer: MetricsWriter,
    setup: Setup,
    workdir: files.Workdir,
    result: loop.Result,
    seconds: float | None,
) -> int:
    """Print how the run ended, and return the exit code.

    `seconds` is the duration of this run, None if an earlier run had made all steps.
    """
    where = f"step {result.step} of {setup.config.loop.steps}, {result.tokens} tokens"
    if result.step:
        writer.say(f"exported: {workdir.export}")
    if result.reason == loop.INTERRUPTED:
        kept = "saved. The same command resumes it" if result.step else "nothing is saved yet"
        writer.say(f"interrupted at {where}; {kept}: {workdir.root}")
        return command.INTERRUPTED
    if result.reason == loop.TIME:
        writer.say(f"the minutes are over at {where}; saved. The same command resumes it")
        return 0
    if seconds is None:
        exports = _exports(setup.method, workdir)
        field = "target" if setup.method.head is None else "start_from"
        writer.say(
            f"this run was finished before: {where}. To train further, give another workdir and "
            f"--config.{field}={_as_argument(next(iter(exports.values())))}",
            "yellow",
        )
    else:
        writer.say(f"trained: {where}, {seconds:.0f} s in this run")
    _say_next(writer, setup, workdir, result.state.result)
    return 0


def _say_next(writer: MetricsWriter, setup: Setup, workdir: files.Workdir, params: Any) -> None:
    """Print what the run learned, how to decode with the result, and how to make more data."""
    curve = files.learning_curve(workdir)
    tau = _compared_tau(setup)
    decoded = [row for row in curve if row["step"] and tau in row]
    best = max(decoded, key=lambda row: row[tau], default=None)
    if best is not None and best is not decoded[-1] and workdir.best.is_dir():
        note = "" if setup.method.calibrate is None else " (its confidence is not calibrated)"
        step, largest = best["step"], best[tau]
        writer.say(f"{tau} was largest at step {step}, {largest:.3f}: {workdir.best}{note}")
    learned = [
        f"{label} {curve[0][name]:.3f} -> {curve[-1][name]:.3f}"
        for name, label in _LEARNED.items()
        if len(curve) > 1 and name in curve[0] and name in curve[-1]
    ]
    if learned:
        writer.say(f"held out, from step {curve[0]['step']} on: {', '.join(learned)}", "green")
    where = {kind: _as_argument(path) for kind, path in _exports(setup.method, workdir).items()}
    target = where.get("model", setup.config.target)
    options = [] if target == DEFAULT_MODEL else [f"target={target}"]
    drafter = dict(setup.method.drafter_options)
    if setup.method.head is not None:
        drafter = {"name": setup.method.head(params, {}).kind}
        drafter |= {"path": where["drafter"]} if "drafter" in where else {}
    if drafter:
        options += [f"drafter.{name}={value}" for name, value in drafter.items()]
        options.append("compare=true")
    command = " ".join(f"--config.{option}" for option in options)
    writer.say(f"decode with it: python -m specjax.decode {command}", "green")
    if _shipped_alone(setup.config.data):
        writer.say(_MORE_DATA, "green")


def _shipped_alone(data: str) -> bool:
    """Return whether a config's data are only the small bundled set."""
    return set(split_names(data)) == {shipped.NAME}


def _as_argument(path: Path) -> str:
    """Return a path as a shell argument, relative to the working directory if it is below it."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
