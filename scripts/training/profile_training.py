"""Print where a training step's time goes.

    python scripts/training/profile_training.py --method=train.eagle \
        --config=configs/train_eagle3.py --config.data=DIRECTORY

Each part is a program of its own, timed alone: reading a batch (and what the loop waits for where a
thread reads ahead), the target's forward, the loss's forward, its backward (gradients less
forward), the update, and the whole step, in which XLA may overlap them. Operations are those of
products, counted in the traced program. `--steps` sets how often each part runs, the median counts.
Nothing is written; the config is that of a training run.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from specjax.cli import command
from specjax.cli.config_file import read_config
from specjax.cli.flags import Parser
from specjax.distributed.sharding import use
from specjax.errors import InputError, one_line
from specjax.reporting import decode_report
from train.data.batches import Batch, read_ahead
from train.data.packing import Position
from train.methods.packed_rows import fill_features
from train.run.config import read_training_config
from train.run.setup import Setup, set_up
from train.run.step import LATE, State, loss_function


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = Parser("python scripts/training/profile_training.py", __doc__)
    parser.add_argument("--method", required=True, help="a module with make_method and Config")
    parser.add_argument("--steps", type=int, default=5, help="how often each part is timed")

    def run(argv: list[str]) -> int:
        arguments, rest = parser.parse_known_args(argv)
        method = _method(arguments.method)
        values = read_config(rest, method.Config.DEFAULT).to_dict()
        config = read_training_config(method.Config, values)
        profile(set_up(config, method.make_method), max(arguments.steps, 1))
        return 0

    return command.run(run, argv)


def _method(name: str) -> ModuleType:
    """The module of a method; raises InputError for other names."""
    try:
        module = importlib.import_module(name)
        _ = module.make_method, module.Config.DEFAULT
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InputError(
            f"--method={name!r}: {one_line(error)}; use a module with make_method and Config, such "
            "as train.eagle"
        ) from None
    return module


def profile(setup: Setup, steps: int) -> None:
    """Time the parts of a run's step and print a table."""
    batches, mesh = setup.config.batches, setup.mesh
    program = setup.program()
    rows = setup.feed.batches(Position(0, 0))
    read_s = [_seconds(lambda: next(rows))[0] for _ in range(steps + 1)][1:]
    batch: Batch = next(rows)[0]
    tokens, labels = (int(_count(leaf)) for leaf in (batch.segments > 0, batch.labels >= 0))

    parts: list[tuple[str, float, float | None]] = []
    # What a step computes may depend on its number: all parts are of one late in the run.
    state = program.state.replace(step=program.state.step + LATE)
    target_params = setup.target_params
    names = setup.method.features
    with use(mesh):
        filling = jax.jit(lambda params, batch: _filled(setup, params, batch, names))
        filled = filling(target_params, batch)
        if any(name not in batch.features for name in names):
            parts.append(("target forward", *_timed(filling, steps, target_params, batch)))
        forward = jax.jit(lambda *given: _forward(setup, *given))
        loss_s, loss_flops = _timed(forward, steps, state.params, target_params, filled)
        grads_s, grads_flops = _timed(program.gradients, steps, state, target_params, filled)
        parts.append(("loss forward", loss_s, loss_flops))
        parts.append(("backward", max(grads_s - loss_s, 0.0), grads_flops - loss_flops))
        grads = program.gradients(state, target_params, filled)[0]
        keep = jax.tree.map(jnp.copy, state)
        parts.append(("update", _chained(program.update, keep, steps, grads), None))
        step_flops = products(jax.make_jaxpr(program.step)(state, target_params, batch).jaxpr)
        compiled = program.compile(target_params, batch)
        whole_s, wait_s = _looped(setup, compiled, state, steps)

    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(
        f"{setup.method.name} for {setup.target.name}, products in {setup.products}, on "
        f"{decode_report.device_name(mesh)}: {tokens} tokens, {labels} labels in "
        f"{batches.batch_size} rows of {batches.row_tokens}, {batches.accumulate} "
        f"micro-batch{'es' if batches.accumulate > 1 else ''}",
        soft_wrap=True,
    )
    table = Table("part", "ms", "share", "Gflop", "Gflop/s")
    for label, seconds, flops in parts:
        _add(table, label, seconds, whole_s, flops)
    _add(table, "waiting for data", wait_s, whole_s, None)
    table.add_section()
    _add(table, "whole step", whole_s, whole_s, step_flops)
    _add(table, "reading a batch (by a thread)", statistics.median(read_s), whole_s, None)
    console.print(table)
    memory = compiled.memory_analysis()
    used = f"{memory.temp_size_in_bytes / 1e6:.0f} MB of temporaries" if memory else "no figures"
    console.print(f"{tokens / whole_s:.0f} tokens/s; memory: {used}")


def _filled(setup: Setup, target_params: Any, batches: Batch, names: tuple[str, ...]) -> Batch:
    def one(batch: Batch) -> Batch:
        stored = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
        batch = batch.replace(features=stored)
        return fill_features(setup.decoder, target_params, batch, names)

    return jax.lax.map(one, batches)


def _forward(setup: Setup, params: Any, target_params: Any, batches: Batch) -> Any:
    loss = loss_function(setup.method, setup.decoder, setup.config.remat)
    key = jax.random.key(0)
    return jax.lax.map(lambda batch: loss(params, target_params, batch, key)[0], batches)


def _looped(setup: Setup, compiled: Callable, state: State, steps: int) -> tuple[float, float]:
    """The median seconds of whole steps, and of their wait for a batch."""
    whole, waited = [], []
    with closing(read_ahead(setup.feed.batches(Position(0, 0)))) as ahead:
        for _ in range(steps + 2):
            begin = time.perf_counter()
            batch, _ = next(ahead)
            waited.append(time.perf_counter() - begin)
            state, report = compiled(state, setup.target_params, batch)
            jax.block_until_ready(report)
            whole.append(time.perf_counter() - begin)
    return statistics.median(whole[2:]), statistics.median(waited[2:])


def _timed(program: Callable, steps: int, *given: Any) -> tuple[float, float]:
    """The median seconds of a jitted function after its first call, and its operations."""
    jax.block_until_ready(program(*given))
    seconds = [_seconds(lambda: program(*given))[0] for _ in range(steps)]
    return statistics.median(seconds), products(jax.make_jaxpr(program)(*given).jaxpr)


def _chained(program: Callable, state: State, steps: int, grads: Any) -> float:
    """The same for an update, whose state is donated."""
    seconds = []
    for _ in range(steps + 1):
        spent, (state, _) = _seconds(lambda state=state: program(state, grads))
        seconds.append(spent)
    return statistics.median(seconds[1:])


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - begin, result


def _count(mask: jax.Array) -> jax.Array:
    return mask.sum()


def products(jaxpr: Any) -> float:
    """Floating-point operations of all products in a program, loops counted as often as they run.

    A `while` of unknown length counts once; of branches the largest counts.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        inner = [products(one) for one in _inside(equation)]
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += (
                2
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(shape[axis] for axis in contracted)
            )
        elif equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "cond":
            total += max(inner, default=0.0)
        else:
            total += sum(inner)
    return total


def _inside(equation: Any) -> Iterator[Any]:
    """The programs that an equation calls; of a custom gradient, the one that runs."""
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "jaxpr"):
                yield one.jaxpr
            elif hasattr(one, "eqns"):
                yield one


def _add(table: Table, label: str, seconds: float, whole: float, flops: float | None) -> None:
    table.add_row(
        label,
        f"{1e3 * seconds:.1f}",
        f"{seconds / whole:.0%}",
        "" if not flops else f"{flops / 1e9:.2f}",
        "" if not flops or not seconds else f"{flops / seconds / 1e9:.0f}",
    )


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
