"""The metrics and progress of a run, on screen, in metrics.jsonl and in TensorBoard."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from train.experts.balance import imbalance
from train.run import workdir as files
from train.run.tensorboard import TensorBoardWriter
from train.run.workdir import Workdir


def scalars(sums: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return named numbers from sums of `Measures`, as returned by `sums_of`.

    Names begin with `prefix`. `loss` and its parts are means over labels. For drafts at depth i:
    `acc_pos_i` is the accuracy given the true tokens before, `full_acc_i` that of the draft and all
    drafts before it, `cond_acc_i` the accuracy given that all before are right; `tau_sim` is the
    tokens per round that `full_acc` implies. With experts, `load_imbalance` is the largest load
    over the mean. The method's `rates` have their own names.
    """
    numbers = {"loss": _ratio(sums["loss"], sums["weight"])}
    for name, value in sums["losses"].items():
        numbers[f"loss_{name}"] = _ratio(value, sums["weight"])
    tau, before = 1.0, 1.0
    rows = zip(sums["correct"], sums["prefix_correct"], sums["counts"], strict=True)
    for depth, (right, along, count) in enumerate(rows):
        full = _ratio(along, count)
        numbers[f"acc_pos_{depth}"] = _ratio(right, count)
        numbers[f"full_acc_{depth}"] = full
        numbers[f"cond_acc_{depth}"] = _ratio(full, before)
        tau, before = tau + full, full
    if sums["counts"]:
        numbers["tau_sim"] = tau
    for name, (part, whole) in sums.get("rates", {}).items():
        numbers[name] = _ratio(part, whole)
    if (uneven := imbalance(sums["loads"])) is not None:
        numbers["load_imbalance"] = uneven
    return {f"{prefix}/{name}": value for name, value in numbers.items()}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def sums_of(loss: Any, measures: Any) -> dict[str, Any]:
    """Return a step's loss and `Measures` as JSON-ready numbers and lists, for `add`."""
    sums = {"loss": loss, **vars(measures)}
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).tolist(), sums)


def add(total: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two results of `sums_of`; without a `total` it is `more`."""
    return jax.tree.map(operator.add, total, more) if total else more


class MetricsWriter:
    """A writer of a run's metrics to the screen, to metrics.jsonl and to TensorBoard.

    If `quiet`, as on all processes but the first, it writes nothing.
    """

    def __init__(
        self, workdir: Workdir, console: Console, steps: int, step: int, quiet: bool = False
    ) -> None:
        self._workdir, self._quiet, self._steps = workdir, quiet, steps
        self._console = Console(quiet=True) if quiet else console
        self._tensorboard = None if quiet else TensorBoardWriter(workdir.tensorboard, step)
        self._first_step: tuple[int, float] | None = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def say(self, line: str, style: str = "") -> None:
        """Print a line of text; `style` is a style of the package rich, such as "bold red"."""
        self._console.print(Text(line, style), soft_wrap=True)

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """Print `doing`, such as "loading", when a context begins, and at its end the seconds."""
        begin = time.perf_counter()
        self.say(f"{doing} ...", "dim")
        yield
        self.say(f"{doing}: {time.perf_counter() - begin:.1f} s", "dim")

    def begin_steps(self, step: int) -> None:
        """Start to measure the time per step, when `step` steps have finished."""
        self._first_step = (step, time.perf_counter())

    def finish_step(self, step: int, shown: bool) -> None:
        """Print that the first step has finished, unless its metrics are `shown` anyway."""
        if self._first_step is not None and step == self._first_step[0] + 1 and not shown:
            seconds = time.perf_counter() - self._first_step[1]
            self.say(f"step {step}/{self._steps}  {seconds:.1f} s{self._remaining(step)}", "dim")

    def log(self, step: int, numbers: Mapping[str, float], show: str | None = None) -> None:
        """Write the numbers of a step, by name, to both files; print the line `show` if given."""
        if self._quiet:
            return
        files.append_metrics(self._workdir, {"step": step, **numbers})
        self._tensorboard.write(step, numbers)
        if show is not None:
            self.say(f"step {step}/{self._steps}  {show}{self._remaining(step)}")

    def _remaining(self, step: int) -> str:
        left = self.seconds_left(step)
        return f"  {clock(left)} left" if left else ""

    def seconds_left(self, step: int) -> float | None:
        """Return the estimated seconds for the steps after this one, or None if unknown."""
        first, begin = self._first_step or (step, 0.0)
        if step >= self._steps:
            return 0.0
        if step == first:
            return None
        return (time.perf_counter() - begin) / (step - first) * (self._steps - step)


def shown(numbers: Mapping[str, float], prefix: str = "train") -> str:
    """Return the text of a line of metrics on screen, from the numbers that begin with `prefix`."""
    at = lambda name: numbers.get(f"{prefix}/{name}")  # noqa: E731
    parts = [f"loss {at('loss'):.4f}"]
    begin = f"{prefix}/loss_"
    losses = {name: value for name, value in numbers.items() if name.startswith(begin)}
    if len(losses) > 1:
        parts += [f"{name.removeprefix(begin)} {value:.3f}" for name, value in losses.items()]
    for label, measure in (("acc", "acc_pos_"), ("cond", "cond_acc_")):
        begin = f"{prefix}/{measure}"
        depths = [value for name, value in numbers.items() if name.startswith(begin)]
        if depths:
            parts.append(f"{label} " + " ".join(f"{value:.3f}" for value in depths))
    begin = f"{prefix}/exit_accept_"
    exits = {name[len(begin) :]: rate for name, rate in numbers.items() if name.startswith(begin)}
    if exits:
        by_exit = sorted(exits.items(), key=lambda item: (len(item[0]), item[0]))
        parts.append("accepted " + " ".join(f"{exit}:{rate:.3f}" for exit, rate in by_exit))
    if (tau := at("tau_sim")) is not None:
        parts.append(f"tau_sim {tau:.3f}")
    if (uneven := at("load_imbalance")) is not None:
        parts.append(f"imbalance {uneven:.2f}")
    if (weight := at("lambda")) is not None:
        parts.append(f"lambda {weight:g}")
    if (rate := at("learning_rate")) is not None:
        parts.append(f"lr {rate:.1e}  grad {at('grad_norm'):.2f}")
    if (speed := at("tokens_per_second")) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Return a number of seconds as text, such as "40 s", "12 min" or "2.5 h"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
