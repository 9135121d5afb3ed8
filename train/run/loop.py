"""The training loop: steps, checkpoints (also on interruption) and limits."""

from __future__ import annotations

import collections
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax import signals
from specjax.distributed import processes
from specjax.errors import InputError
from train.data.batches import build, read_ahead
from train.data.packing import Packing, Position, Shape, Source
from train.run import checkpoints
from train.run import workdir as files
from train.run.checkpoints import Saved
from train.run.config import EvalConfig, LoopConfig
from train.run.metrics import MetricsWriter, add, scalars, shown, sums_of
from train.run.sharding import Placement
from train.run.step import Program, Report, TrainState
from train.run.workdir import Workdir

DONE, TIME, INTERRUPTED = "done", "time", "interrupted"
"""Why a run ended: all steps made, `minutes` over, Ctrl-C or SIGTERM."""

_AGREE_EVERY = 10
"""The number of steps after which several processes ask each other whether one wants to stop."""
_IN_FLIGHT = 1
"""The number of steps by which the host may be ahead of the device's results."""

_SPEED_OVER_S = 5.0
_BEGIN = Position(0, 0)

Evaluate = Callable[[Any, int, bool], dict[str, float]]


@dataclass(frozen=True)
class Result:
    """The state and step at which a run ended, and the reason for ending."""

    state: TrainState
    step: int
    reason: str
    tokens: int


@dataclass(frozen=True)
class Feed:
    """The input of the loop: packed rows of a source, placed on the devices."""

    source: Source
    packing: Packing
    shape: Shape
    placement: Placement

    def batches(self, position: Position) -> Iterator[tuple[Any, Position]]:
        """Yield batches on the devices, each with the position after it, without end.

        The first row is that at `position`. Each process reads only its own rows of a batch.
        """
        following = self.packing.advance(position)
        while True:
            taken = [next(following) for _ in range(self.shape.rows)]
            rows = [taken[number][0] for number in self.placement.rows]
            yield self.placement.put(build(self.source, rows, self.shape)), taken[-1][1]


@dataclass
class Progress:
    """What a checkpoint contains besides arrays.

    `position` is that of the next row in the data, `tokens` are those trained on so far, and `sums`
    are the sums of losses and measures since the last line of metrics.
    """

    step: int = 0
    position: Position = _BEGIN
    tokens: int = 0
    sums: dict[str, Any] | None = None

    def metadata(self) -> dict[str, Any]:
        """Return the progress as JSON-ready metadata."""
        return {
            "training": 1,
            "step": self.step,
            "position": list(self.position),
            "tokens": self.tokens,
            "sums": self.sums or {},
        }

    @classmethod
    def of(cls, saved: Saved) -> Progress:
        """Return the progress of a checkpoint, from its `metadata`."""
        metadata = saved.metadata
        return cls(
            metadata["step"],
            Position(*metadata["position"]),
            metadata["tokens"],
            metadata["sums"] or None,
        )


def train(
    program: Program,
    target_params: Any,
    feed: Feed,
    config: LoopConfig,
    evaluations: EvalConfig,
    workdir: Workdir,
    writer: MetricsWriter,
    progress: Progress,
    evaluate: Evaluate | None = None,
) -> Result:
    """Train from `progress` until all steps are done, the time is over, or a signal arrives.

    `evaluate` is called as often as `evaluations` says. `program.state` is donated. At least one
    step runs, however short the time. Unless an error occurs, the last step is saved as a
    checkpoint. Raises InputError, naming the step, if a loss or a gradient is not finite.
    """
    state = program.state
    saved_step = progress.step if progress.step else None
    deadline = math.inf if config.minutes is None else time.monotonic() + 60 * config.minutes
    pending: collections.deque[tuple[int, Position, Report]] = collections.deque()
    window = _Window()

    def settle(most: int) -> None:
        while len(pending) > most:
            step, position, report = pending.popleft()
            _take(progress, step, position, report, workdir, saved_step)
            window.tokens += int(report.tokens)
            logged = step % config.log_every == 0 or step == config.steps
            writer.finish_step(step, shown=logged)
            if logged:
                numbers = _numbers(progress, report, window)
                if (left := writer.seconds_left(step)) is not None:
                    numbers["train/seconds_left"] = left
                writer.log(step, numbers, shown(numbers))
                progress.sums = None

    def save() -> None:
        nonlocal saved_step
        settle(0)
        if saved_step != progress.step and progress.step:
            saver.save(progress.step, checkpoints.as_dict(state), progress.metadata())
            saved_step = progress.step

    step = first = progress.step
    reason = DONE
    if evaluate and evaluations.at_start and not step and not files.is_evaluated(workdir, 0):
        writer.log(0, evaluate(state.result, 0, False))
    batches = feed.batches(progress.position)
    compiled = None
    with (
        _listening() as asked,
        closing(read_ahead(batches)) as ahead,
        checkpoints.saver(workdir, progress.step) as saver,
    ):
        while step < config.steps:
            over = time.monotonic() > deadline and step > first
            if _anyone(step, asked.is_set() or over):
                reason = TIME if over and not asked.is_set() else INTERRUPTED
                break
            begin = time.perf_counter()
            batch, position = next(ahead)
            window.waited += time.perf_counter() - begin
            if compiled is None:
                with window.paused(), writer.working("compiling the training step"):
                    compiled = program.compile(target_params, batch)
                writer.begin_steps(step)
            state, report = compiled(state, target_params, batch)
            step += 1
            pending.append((step, position, report))
            settle(_IN_FLIGHT)
            due = evaluations.every and step % evaluations.every == 0
            if evaluate and due and step < config.steps:
                settle(0)
                with window.paused():
                    writer.log(step, evaluate(state.result, step, False))
            # After the evaluation, so that no checkpoint is ahead of a line of metrics.
            if step % config.checkpoint_every == 0:
                with window.paused():
                    save()
        save()
    if evaluate and reason == DONE and not files.is_evaluated(workdir, step):
        writer.log(step, evaluate(state.result, step, True))
    return Result(state, progress.step, reason, progress.tokens)


class _Window:
    """The times since the last line of metrics, and of earlier lines.

    When a checkpoint waits for several steps at once, a line alone may span no time, so speeds are
    averaged over the last seconds.
    """

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[float, float, int]] = collections.deque()
        self.restart()

    def restart(self) -> None:
        """Start a new window now."""
        self.begin, self.waited, self.tokens = time.perf_counter(), 0.0, 0

    def speeds(self) -> tuple[float, float]:
        """Return tokens per second and the fraction of time spent waiting for data.

        This ends the window and begins a new one.
        """
        self._lines.append((time.perf_counter() - self.begin, self.waited, self.tokens))
        while sum(line[0] for line in self._lines) - self._lines[0][0] >= _SPEED_OVER_S:
            self._lines.popleft()
        spent, waited, tokens = map(sum, zip(*self._lines, strict=True))
        self.restart()
        spent = max(spent, 1e-9)
        return tokens / spent, waited / spent

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside the context from the window."""
        begin = time.perf_counter()
        yield
        # A line may have begun a new window inside.
        self.begin += time.perf_counter() - max(begin, self.begin)


def _take(
    progress: Progress,
    step: int,
    position: Position,
    report: Report,
    workdir: Workdir,
    saved_step: int | None,
) -> None:
    """Add a step's report to the run's progress.

    Raises InputError, naming the last checkpoint `saved_step`, if the loss or gradient is not
    finite.
    """
    loss, norm = float(report.loss), float(report.grad_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        kept = (
            f"the checkpoint of step {saved_step} in {workdir.checkpoints} is good"
            if saved_step
            else "there is no checkpoint yet"
        )
        raise InputError(
            f"step {step}: the loss is {loss}, the gradient's norm {norm}; {kept}; begin again in "
            "another workdir with a lower learning_rate, a longer warmup, or dtype=float32"
        )
    progress.step, progress.position = step, position
    progress.tokens += int(report.tokens)
    progress.sums = add(progress.sums, sums_of(loss, report.measures))


def _numbers(progress: Progress, report: Report, window: _Window) -> dict[str, float]:
    """Return the numbers of a line of metrics, and begin a new window."""
    speed, waited = window.speeds()
    numbers = scalars(progress.sums, "train")
    numbers |= {
        **{f"train/{name}": float(value) for name, value in report.schedules.items()},
        "train/grad_norm": float(report.grad_norm),
        "train/tokens": float(progress.tokens),
        "train/tokens_per_second": speed,
        "train/data_wait": waited,
    }
    return numbers


def _anyone(step: int, mine: bool) -> bool:
    """Return whether some process wants to stop; `mine` is whether this one does.

    Several processes ask each other only every few steps.
    """
    if processes.count() == 1:
        return mine
    if step % _AGREE_EVERY:
        return False
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array([mine]), tiled=True)))


@contextmanager
def _listening() -> Iterator[threading.Event]:
    """Yield an event that is set by a request to stop; a second Ctrl-C interrupts as usual."""
    asked = threading.Event()

    def receive(number: int) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    with signals.received_by(receive):
        yield asked


def resumed(program: Program, saved: Saved) -> tuple[Program, Progress]:
    """Return the program with the arrays of a checkpoint, and the progress saved with them.

    Each device reads only its own part of each array.
    """
    state = checkpoints.restore(saved, program.state)
    jax.block_until_ready(state)
    return program._replace(state=state), Progress.of(saved)
