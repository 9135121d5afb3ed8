"""A learner: it decodes with a head, and trains the head on what was decoded, between steps."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np

from specjax.distributed import processes
from specjax.distributed.sharding import fetch, use
from specjax.drafters import DRAFTERS
from specjax.engine.engine import Engine
from specjax.engine.outputs import Delta
from specjax.engine.requests import SEED
from specjax.errors import InputError
from specjax.fields import Number, Whole, check_instance
from specjax.loading.quantize import float_kernel, is_quantized
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.head import Head
from train.methods.method import Method
from train.run.optimizer import Optimization
from train.run.setup import check_logits
from train.run.start_from import started_from
from train.run.step import make_program
from train.while_decoding.batches import batch_of


@dataclass(frozen=True)
class LearnerOptions:
    """When a learner trains, and on what. Raises InputError for values out of range."""

    batch_size: Annotated[int, Whole(1)] = 4
    """The number of recorded rows per training step, drawn at random from the latest."""
    row_labels: Annotated[int, Whole(1)] = 256
    """The maximum number of labels per row; further output tokens are dropped."""
    rows: Annotated[int, Whole(1)] = 64
    """The number of latest finished requests that the engine keeps for training."""
    row_tokens: Annotated[int, Whole(4)] = 512
    """The maximum number of their tokens, the last ones if there are more."""
    share: Annotated[float, Number(0.0, 1.0)] = 0.25
    """The most of the time of decoding and training that may be spent on training; 1 for any."""
    passes: Annotated[float, Number(above=True)] = 2.0
    """The most times that a recorded request is trained on, on average."""
    update_every: Annotated[int, Whole(1)] = 8
    """The number of training steps after which the engine drafts with the new parameters."""
    seed: Annotated[int, SEED] = 0
    """The seed of the choice of rows, and of the method's noise."""

    def __post_init__(self) -> None:
        check_instance(self, "")
        if self.passes * self.rows < self.batch_size:
            raise InputError(
                f"passes={self.passes}, rows={self.rows}: too few for a step of "
                f"batch_size={self.batch_size}; use passes x rows of at least that"
            )


_OPTIONS = LearnerOptions()
_CONSTANT = Optimization(learning_rate=3e-4, schedule="constant", warmup=20)


class Learner:
    """An engine, and the training of the head with which it drafts.

        engine = Engine(model, drafter=head_drafter(head, model))
        method = eagle_method(model, head.config, head.draft_ids, EagleLoss(steps=3))
        learner = Learner(engine, head, method)
        engine.add("Name three rivers.")
        for delta in learner:
            print(delta.text, end="")
        save_head(learner.head(), "build/learned")

    The tokens have the target's distribution whatever the head has learned. `steps` is the number
    of training steps so far, `losses` has their mean losses per label, and `train_s` is the time
    that they took in seconds, without compiling (`compile_s`).
    """

    def __init__(
        self,
        engine: Engine,
        head: Head,
        method: Method,
        options: LearnerOptions = _OPTIONS,
        optimization: Optimization = _CONSTANT,
        *,
        weights: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Let `engine`, without unfinished requests, record what `method` reads, and use `head`.

        `method` trains such a head for the engine's frozen target. `weights` is the storage of the
        head's kernels, as when the engine's drafter was made, and `clock` returns seconds. Raises
        InputError for a method or a head that does not fit the engine.
        """
        if method.trains_target or method.head is None:
            raise InputError(f"method={method.name!r}: trains the target too; use another")
        decay_steps, falls = optimization.decay_steps, optimization.schedule != "constant"
        if decay_steps is None or (falls and decay_steps == 1):
            raise InputError(
                f"optimization.decay_steps={decay_steps}: the number of training steps is unknown; "
                'use schedule="constant", or give the step at which the rate has fallen'
            )
        model, mesh = engine.plan.model, engine.plan.mesh
        check_logits(model.config, model.name)
        self.engine, self.options = engine, options
        # The method's own initial parameters may be copies of a target in floating point.
        self._method = started_from(method, method.head(head.params, {}), head, "head")
        self._part = _part_of(engine, head.kind)
        self._weights, self._clock = weights, clock
        engine.record(method.features, rows=options.rows, tokens=options.row_tokens)
        program = make_program(
            self._method, model.architecture, optimization, mesh, seed=options.seed
        )
        self._program, self._state = program, program.state
        self._compiled: Callable[..., Any] | None = None
        self._rng = np.random.default_rng(options.seed)
        self._teacher: tuple[Any, Any] = (None, None)
        self.steps, self.train_s, self.compile_s = 0, 0.0, 0.0
        self.losses: list[float] = []
        self._decode_s = self._last_s = self._rows_left = 0.0
        self._counted = 0
        self.update()

    def step(self) -> list[Delta]:
        """Train as the options allow, and return the deltas of a step of the engine."""
        while self._may_train():
            self.train()
        begun, compiled_s = self._clock(), self.engine.statistics.compile_s
        deltas = self.engine.step()
        compiled_s = self.engine.statistics.compile_s - compiled_s
        self._decode_s += self._clock() - begun - compiled_s
        return deltas

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas of all steps, until every request has finished; then train once more."""
        while self.engine.num_unfinished:
            yield from self.step()
        while self._may_train():
            self.train()

    def head(self) -> Head:
        """Return the head as trained so far, which `save_head` saves.

        Raises InputError if a training step has spoiled it.
        """
        if len(self.losses) < self.steps:
            raise InputError(f"head: not finite since training step {self.steps - 1}")
        training = {"method": self._method.name, "step": self.steps, "while_decoding": True}
        return self._method.head(fetch(self._state.result), training)

    def update(self) -> None:
        """Let the engine draft with the head as trained so far."""
        model, drafter = self.engine.plan.model, self.engine.plan.drafter
        params = list(drafter.params)
        params[self._part] = complete_parameters(self.head(), model, self._weights)
        self.engine.update_params(drafter_params=tuple(params))

    def train(self) -> None:
        """Make a training step on recorded rows, at least one of which is needed.

        The engine's work in progress is finished first. Raises InputError if the loss is not
        finite.
        """
        if not (count := min(self.engine.num_recorded, self.options.rows)):
            raise InputError("train: no request has finished yet; call it after some have")
        self.engine.wait()
        begun = self._clock()
        rows = self._rng.integers(count, size=self.options.batch_size)
        size = min(self.options.row_labels, self.engine.recorded.tokens.shape[1])
        with use(self.engine.plan.mesh):
            batch = batch_of(self.engine.recorded, rows, num_labels=size)
        batches, teacher = jax.tree.map(lambda leaf: leaf[None], batch), self._target_params()
        if self._compiled is None:
            program = self._program._replace(state=self._state)
            remedy = "lower batch_size, row_tokens or row_labels"
            self._compiled = program.compile(teacher, batches, remedy)
            self.compile_s = self._clock() - begun
            begun = self._clock()
        self._state, report = self._compiled(self._state, teacher, batches)
        self.steps += 1
        self._rows_left -= self.options.batch_size
        loss = float(report.loss) / max(float(report.measures.weight), 1.0)
        if not (np.isfinite(loss) and np.isfinite(float(report.grad_norm))):
            raise InputError(
                f"the loss or the gradient of training step {self.steps - 1} is not finite; lower "
                "learning_rate"
            )
        self.losses.append(loss)
        if self.steps % self.options.update_every == 0:
            self.update()
        self._last_s = self._clock() - begun
        self.train_s += self._last_s

    def _may_train(self) -> bool:
        """Return whether there are rows that were trained on too little, and time is left."""
        options, recorded = self.options, self.engine.num_recorded
        new, self._counted = recorded - self._counted, recorded
        # Rows that are no longer there cannot be made up for.
        most = options.passes * min(recorded, options.rows)
        self._rows_left = min(self._rows_left + options.passes * new, most)
        if self._rows_left < options.batch_size or not options.share:
            return False
        if options.share == 1:
            return True
        # The first step costs an unknown time.
        allowed = options.share * (self._decode_s + self.train_s)
        return processes.from_first(self.train_s + self._last_s <= allowed)

    def _target_params(self) -> Any:
        """Return the parameters of the engine's present target that losses read, as floats."""
        params = self.engine.plan.model.params
        read = {name: params[name] for name in ("embed", "head") if name in params}
        arrays = jax.tree.leaves(read)
        if self._teacher[0] is None or any(map(operator.is_not, arrays, self._teacher[0])):
            self._teacher = arrays, jax.tree.map(float_kernel, read, is_leaf=is_quantized)
        return self._teacher[1]


def _part_of(engine: Engine, kind: str) -> int:
    """Return the index of an engine's drafter for a head of a kind.

    Raises InputError if it has none, or several.
    """
    parts = engine.plan.drafter.drafter.parts
    found = [index for index, part in enumerate(parts) if type(part) is DRAFTERS[kind]]
    if len(found) != 1:
        raise InputError(
            f"engine: {len(found)} drafters of {engine.plan.drafter.name} are of the kind {kind}; "
            "make it with one for the head, alone or in turns with others"
        )
    return found[0]
