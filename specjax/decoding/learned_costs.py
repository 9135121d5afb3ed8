"""What a session with "auto" learns of costs and acceptance, from batch to batch, on the host."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specjax.decoding.plan import Programs, Session, batch_arguments
from specjax.decoding.state import RUNNING, State
from specjax.distributed import processes
from specjax.distributed.sharding import fetch
from specjax.draft_length.estimate import CostEstimate
from specjax.draft_length.policy import Costs, Policy, Work
from specjax.errors import InputError
from specjax.files import json_files, paths
from specjax.files.text_files import write_text

ROUNDS_PER_LOOK = 16
"""The most rounds between two looks at the clock."""
_MEASURED_TURNS = 3
"""How often each kind of round is timed; the median counts."""


@dataclass
class LearnedCosts:
    """Costs, and what became of draft tokens; `measure_s` are the seconds that measuring took."""

    estimate: CostEstimate
    file: Path | None
    measure_s: float
    policy: Policy | None = None

    @classmethod
    def of_session(cls, session: Session, programs: Programs) -> LearnedCosts:
        """With the figures of an earlier process for the same work here, or measured now.

        All processes get what the first one has.
        """
        file = _file(session)
        begin = time.perf_counter()
        num_widths, drafters = len(session.plan.widths), len(session.plan.drafter.parts)
        seconds = _read(file, num_widths + 2 * drafters) if processes.is_first() else None
        seconds = processes.from_first(seconds)
        if seconds is None:
            seconds = processes.from_first(_measure(session, programs).tolist())
        estimate = CostEstimate(np.asarray(seconds), num_widths)
        return cls(estimate, file, time.perf_counter() - begin)

    def begin(self, state: State) -> State:
        """The first state of a batch with what is known."""
        if self.policy is not None:
            # The first step takes the state's buffers over, and a caller may not see a batch's end.
            state = state.replace(policy=jax.tree.map(jnp.copy, self.policy))
        return _put_policy(state, costs=self.costs())

    def after_step(self, state: State, seconds: float) -> State:
        """The state after some rounds that took `seconds`, with the costs corrected by them."""
        work = fetch(state.policy.work)
        self.estimate.update(_flat(work), processes.from_first(seconds))
        return _put_policy(state, costs=self.costs(), work=jax.tree.map(np.zeros_like, work))

    def end(self, state: State) -> None:
        """Keep what a batch has shown of acceptance, for the next one."""
        self.policy = state.policy

    def costs(self) -> Costs:
        """The figures as they are now."""
        passes, others = np.split(self.estimate.seconds, [self.estimate.num_widths])
        return Costs(passes, *np.split(others, 2))

    def save(self) -> None:
        """Keep the figures for later processes; where that fails, they measure again."""
        if self.file is None or not processes.is_first():
            return
        with suppress(OSError, InputError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps({"seconds": self.estimate.seconds.tolist()}))


def _flat(parts: Work) -> Float[np.ndarray, "parts"]:
    return np.concatenate([parts.passes, parts.first, parts.further]).astype(float)


def _put_policy(state: State, **parts: Any) -> State:
    """The state with other parts of its policy, each where the one before was placed."""

    def put(new: Any, old: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(new, old.dtype), old.sharding)

    policy = state.policy
    new = {name: jax.tree.map(put, part, getattr(policy, name)) for name, part in parts.items()}
    return state.replace(policy=policy.replace(**new))


def _measure(session: Session, programs: Programs) -> Float[np.ndarray, "parts"]:
    """Seconds of a plain round at each width, and of drafts, after the first batch's prompts.

    Single rounds of the session's own program, told how wide a window to use and how much to draft;
    all kinds in turn, several times over, so that other work on the machine falls on all alike.
    Raises InputError where the clock does not move.
    """
    plan, parts = session.plan, session.plan.drafter.parts
    first = programs.start(session.params, *batch_arguments(session, session.batches()[0]))
    state = jax.tree.map(jnp.copy, first)

    def seconds(narrowest: int, drafter: int = 0, length: int = 0) -> float:
        nonlocal state
        if not (fetch(state.status) == RUNNING).any():
            state = jax.tree.map(jnp.copy, first)
        forced = np.where(np.arange(len(parts)) == drafter, length, 0)
        state = _put_policy(state, forced=forced, narrowest=np.int32(narrowest))
        begin = time.perf_counter()
        state = jax.block_until_ready(programs.run(session.params, state, np.int32(1)))
        return time.perf_counter() - begin

    found = []
    for _ in range(_MEASURED_TURNS):
        passes = [seconds(width) for width in range(len(plan.widths))]
        ones, furthers = [], []
        for number, part in enumerate(parts):
            longest, widest = part.num_speculative_tokens, len(plan.widths) - 1
            # What the drafter missed while others were timed is not part of its round.
            seconds(widest, number, min(1, longest))
            one = seconds(widest, number, min(1, longest))
            every = seconds(widest, number, longest)
            ones.append(one - seconds(widest))
            furthers.append((every - one) / max(longest - 1, 1))
        found.append([*passes, *ones, *furthers])
    figures = np.maximum(np.median(found, axis=0), 0.0)
    if not (np.isfinite(figures).all() and figures[0] > 0):
        raise InputError(
            f'num_speculative_tokens="auto": this machine\'s clock says that a round takes '
            f"{figures[0]:g} seconds, so that costs cannot be measured; use a whole number"
        )
    return figures


def _file(session: Session) -> Path | None:
    """Where the figures of such work on this machine are kept; None where nothing can be."""
    plan = session.plan
    # Of the batch that is measured; longer ones correct the figures.
    committed = max(len(session.prompts[prompt]) for prompt in session.batches()[0])
    key = repr(
        (
            jax.__version__,
            jax.devices()[0].device_kind,
            os.cpu_count(),
            session.mesh and tuple(session.mesh.shape.items()),
            plan.target,
            plan.drafter,
            plan.rule,
            plan.widths,
            plan.flags,
            session.num_rows,
            committed.bit_length(),
        )
    )
    try:
        folder = paths.cache_folder("costs")
    except InputError:
        return None
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(file: Path | None, count: int) -> list[float] | None:
    """The figures of a file; None where it has none that are right."""
    if file is None or not file.exists():
        return None
    try:
        seconds = json_files.read_json_file(file)["seconds"]
        seconds = [float(value) for value in seconds]
    except (InputError, OSError, TypeError, KeyError, ValueError):
        return None
    right = len(seconds) == count and all(0 < value < 1e6 for value in seconds)
    return seconds if right else None
