"""A training run from its config: checks, data, target, loop, export; what entry points call."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from specjax import frontdoor, processes, reporting
from specjax.errors import InputError
from specjax.heads.head import save_head
from specjax.models.loading import load_model
from specjax.models.model import Model
from specjax.sharding import DATA, axis_size
from train import loop
from train import workdir as files
from train.batches import Packing, Shape
from train.config import Settings, read_settings, record_of
from train.data.examples import check_target, target_facts
from train.data.sources import Sources, open_sources
from train.evaluate import Evaluation, held_out_prompts
from train.journal import Journal
from train.method import Method
from train.precision import as_multiplied, multiply_dtype
from train.step import gathered, make_program

MakeMethod = Callable[[Model, Sources, ConfigDict], Method]


def main(make_method: MakeMethod, default: str, argv: Sequence[str] | None = None) -> int:
    """What an entry point's main does: read the config, run it, return the exit code."""
    return frontdoor.run(lambda config: run(config, make_method), argv, default=default)


def run(config: ConfigDict, make_method: MakeMethod, console: Console | None = None) -> int:
    """Train what a config says and export it; returns the exit code. Raises InputError.

    `make_method(target, data, config)` gives the method. The same call goes on with a run that was
    stopped before.
    """
    begin = time.perf_counter()
    mesh = frontdoor.open_mesh(config)
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console = console if processes.speaks() else Console(quiet=True)
    for name in ("data", "workdir"):
        if not config[name]:
            raise InputError(f"{name} is missing: pass --config.{name}=DIRECTORY")
    settings = read_settings(config, axis_size(mesh, DATA))
    multiply = multiply_dtype(config.dtype)

    def load() -> tuple[Model, Sources]:
        data = open_sources(config.data.split(","))
        model = load_model(config.target, mesh=mesh)
        check_target(f"data={config.data!r}", data.target, target_facts(model))
        return model, data

    target, data = processes.together(load)
    method = make_method(target, data, config)
    names = _features_read(method, data, settings.features)
    shape = Shape(
        settings.batch_size,
        settings.row_tokens,
        settings.row_labels,
        names,
        target.config.hidden_size,
    )
    training = Packing(data, np.flatnonzero(~data.validation), shape, settings.seed)
    held_out = np.flatnonzero(data.validation)
    record = {
        "config": record_of(config),
        "method": method.name,
        "data": {
            "conversations": len(data),
            "tokens": int(data.lengths.sum()),
            "labels": int(data.num_labels.sum()),
            "features": list(names),
        },
        "target": target_facts(target) | {"name": target.name},
    }
    workdir = files.open_workdir(config.workdir, record)
    decoder = dataclasses.replace(target.architecture, multiply=multiply)
    target_params = as_multiplied(target.params, multiply)
    program = make_program(method, decoder, settings, mesh)
    progress = loop.Progress()
    if saved := files.last_checkpoint(workdir):
        program, progress = loop.resumed(program, saved)
    files.truncate_metrics(workdir, progress.step)

    feed = loop.Feed(data, training, shape)
    with Journal(
        workdir, console, settings.steps, progress.step, not processes.speaks()
    ) as journal:
        _introduce(journal, target, method, program.state.params, feed, settings, mesh, multiply)
        if progress.step:
            journal.say(f"going on behind step {progress.step}, {progress.tokens} tokens")
        evaluation = Evaluation(
            method=method,
            program=program,
            target=target,
            target_params=target_params,
            source=data,
            packing=_held_out_packing(data, held_out, shape, journal),
            shape=shape,
            prompts=held_out_prompts(data, held_out, settings.eval_prompts, settings.row_tokens),
            settings=settings,
            journal=journal,
        )
        outcome = loop.train(
            program, target_params, feed, settings, workdir, journal, progress, evaluation
        )
        facts = {
            "method": method.name,
            "config": record["config"],
            "data": record["data"],
            "step": outcome.step,
            "tokens": outcome.tokens,
        }
        if outcome.step:
            head = method.head(gathered(outcome.state.params, mesh), facts)
            save_head(head, workdir.export, overwrite=True)
        return _end(journal, workdir, outcome, settings, time.perf_counter() - begin)


def _features_read(method: Method, data: Sources, wanted: str) -> tuple[str, ...]:
    """The features that are read from the data set; all that the method needs, or none."""
    missing = [name for name in method.features if name not in data.feature_names]
    if wanted == "stored" and missing:
        there = ", ".join(data.feature_names) or "none"
        raise InputError(
            f"features='stored': {data.parts[0].directory} has no {missing[0]} (there are "
            f"{there}); use features=online, or store them with train.features"
        )
    return () if wanted == "online" or missing else method.features


def _held_out_packing(
    data: Sources, held_out: np.ndarray, shape: Shape, journal: Journal
) -> Packing | None:
    try:
        return Packing(data, held_out, shape, 0)
    except InputError:
        journal.say("no conversation is held out: losses are of the training data only")
        return None


def _introduce(
    journal: Journal,
    target: Model,
    method: Method,
    params: Any,
    feed: loop.Feed,
    settings: Settings,
    mesh: Mesh | None,
    multiply: Any,
) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    packing, shape = feed.packing, feed.shape
    rows, tokens = len(packing.rows(0)), packing.tokens
    source = "stored" if shape.features else "computed in the step"
    journal.say(
        f"{method.name} for {target.name} ({target.num_params / 1e6:.1f}M parameters, frozen): "
        f"{count / 1e6:.2f}M parameters, on {reporting.device_name(mesh)}, products in "
        f"{'float32' if multiply is None else multiply}"
    )
    journal.say(
        f"{packing.conversations} conversations, {tokens} tokens, in {rows} rows of "
        f"{shape.tokens}, {packing.fill_rate():.1%} full; {packing.left_out} without a label left "
        f"out; features {source}"
    )
    epochs = settings.steps * settings.batch_size / rows
    journal.say(
        f"{settings.steps} steps of {settings.batch_size} rows: {epochs:.1f} epochs, about "
        f"{tokens * epochs / 1e6:.2f}M tokens"
    )


def _end(
    journal: Journal,
    workdir: files.Workdir,
    outcome: loop.Outcome,
    settings: Settings,
    seconds: float,
) -> int:
    where = f"step {outcome.step} of {settings.steps}, {outcome.tokens} tokens"
    if outcome.reason == loop.INTERRUPTED:
        journal.say(f"interrupted at {where}; saved. The same command goes on: {workdir.root}")
        return frontdoor.INTERRUPTED
    if outcome.reason == loop.TIME:
        journal.say(f"the minutes are over at {where}; saved. The same command goes on")
    else:
        journal.say(f"trained: {where}, {seconds:.0f} s in this run")
    journal.say(f"exported: {workdir.export}")
    return 0
