"""Running a session: its compiled programs, batch by batch, a few rounds at a time."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from specjax import metrics
from specjax.decoding import loop
from specjax.decoding.learned_costs import LearnedCosts
from specjax.decoding.plan import Programs, Session, batch_arguments
from specjax.decoding.snapshot import Seen, Snapshot, look_at
from specjax.decoding.state import RUNNING, STOPPED, Plan, State
from specjax.decoding.stop_strings import StopFinder
from specjax.distributed import device_memory
from specjax.distributed.sharding import place_rows, use
from specjax.drafters.registry import all_registered
from specjax.errors import InputError, one_line
from specjax.files import compiled_programs


def compile_session(session: Session) -> Programs:
    """The session's programs, compiled now or earlier in this process."""
    return compile_plan(session.plan, session.params, batch_arguments(session, []), session.mesh)


def compile_plan(
    plan: Plan, params: tuple[Any, Any], arguments: tuple, mesh: Mesh | None = None
) -> Programs:
    """The programs of a plan for batches of these shapes; `arguments` are those of `loop.start`."""
    leaves, tree = jax.tree.flatten((params, *arguments))
    return _compile(plan, mesh, tree, tuple(map(_Leaf.of, leaves)))


class _Leaf(NamedTuple):
    """What a program has to know of an argument's array: hashable, as a cache's key must be."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None

    @classmethod
    def of(cls, leaf: Any) -> _Leaf:
        return cls(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))


@functools.lru_cache(maxsize=64)
def _compile(plan: Plan, mesh: Mesh | None, tree: Any, leaves: tuple[_Leaf, ...]) -> Programs:
    compiled_programs.keep_in_library()
    begin = time.perf_counter()
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves
    ]
    params, *arguments = jax.tree.unflatten(tree, shapes)
    _check_drafters(plan, params, arguments)
    with use(mesh):
        start = jax.jit(loop.start, static_argnums=0).lower(plan, params, *arguments)
        state = start.out_info
        start = start.compile()
        # The state goes round: what `start` chose for it holds for every later step.
        placed = None if mesh is None else start.output_shardings
        if placed is not None:
            state = jax.tree.map(
                lambda leaf, there: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there),
                state,
                placed,
            )
        run = jax.jit(loop.run, static_argnums=0, donate_argnums=2, out_shardings=placed)
        run = run.lower(plan, params, state, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    device_memory.check_fits(
        (start, run),
        "lower batch_size, max_length, max_new_tokens or num_speculative_tokens",
        mesh,
    )
    return Programs(start, run, time.perf_counter() - begin)


def _check_drafters(plan: Plan, params: Any, arguments: Sequence[Any]) -> None:
    """Raise InputError, its cause with it, where a drafter of a user's own cannot be traced."""
    if all_registered(plan.drafter.parts):
        return

    try:
        started = jax.eval_shape(functools.partial(loop.start, plan), params, *arguments)
        after = jax.eval_shape(functools.partial(loop.one_round, plan), params, started)
    except Exception as error:  # a drafter is the user's own code and may raise anything
        raise InputError(
            f"drafter {plan.drafter.name!r}: fails in a round ({type(error).__name__}: "
            f"{one_line(error):.200}); propose returns (Draft, state) with "
            "num_speculative_tokens nodes of whole numbers, and the state keeps its shapes"
        ) from error
    before, now = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state.drafter)
        for state in (started, after)
    )
    if before != now:
        raise InputError(
            f"drafter {plan.drafter.name!r}: its state changes shape or dtype in a round; "
            "propose and observe return a state like that of init"
        )


def run_session(
    session: Session,
    rounds: int | None = None,
    programs: Programs | None = None,
    learned: LearnedCosts | None = None,
) -> Iterator[Snapshot]:
    """Decode batch by batch; a snapshot after every `rounds` rounds, and one when a batch is done.

    Without `rounds` a batch is one device call, unless a stop string has to be watched for, or
    draft lengths are decided by costs (`learn_costs`), which are looked at now and then.
    """
    programs = programs or compile_session(session)
    learned = learned or learn_costs(session)
    if rounds is None and any(request.stop for request in session.requests):
        rounds = 8
    rounds = rounds or session.plan.max_rounds
    for index in session.batches():
        yield from run_batch(session, programs, index, rounds, learned)
    if learned is not None:
        learned.save()


def learn_costs(session: Session) -> LearnedCosts | None:
    """What a session that decides draft lengths by costs knows of them; None for other sessions."""
    return LearnedCosts.of_session(session) if session.plan.draft_length.auto else None


def run_batch(
    session: Session,
    programs: Programs,
    index: list[int],
    rounds: int,
    learned: LearnedCosts | None = None,
) -> Iterator[Snapshot]:
    """Decode one of `session.batches()`: a snapshot after every `rounds` rounds, then the last.

    Where the host decides nothing between steps (no stop strings, no draft lengths by costs), the
    next step is under way while the caller looks at a snapshot, and the clock goes on.
    """
    learned = learned or learn_costs(session)
    finders = {
        row: StopFinder(session.model.tokenizer, session.requests[prompt].stop)
        for row, prompt in enumerate(index)
        if session.requests[prompt].stop
    }
    ahead = learned is None and not finders and rounds < session.plan.max_rounds
    arguments = jax.block_until_ready(batch_arguments(session, index))
    begin = time.perf_counter()
    state = jax.block_until_ready(programs.start(session.params, *arguments))
    prefill_s, decode_s = time.perf_counter() - begin, 0.0
    if learned is not None:
        state = learned.begin(state)
    # Nothing is compiled once the clock of decoding runs.
    seen = jax.block_until_ready(look_at(state, session.mesh))

    def step(state: State) -> tuple[State, Seen]:
        count = rounds if learned is None else learned.rounds(rounds)
        state = programs.run(session.params, state, np.int32(count))
        return state, look_at(state, session.mesh)

    kept = np.full(len(index), -1)
    finished = False
    begin = time.perf_counter()
    state, seen = step(state)
    try:
        while not finished:
            now = seen
            if ahead:
                state, seen = step(state)
            status, lengths = np.array(now.status), np.asarray(now.lengths)
            end = time.perf_counter()
            decode_s += end - begin
            if learned is not None:
                state = learned.after_step(state, end - begin)
            begin = end
            stopped = _stop(session, index, now, finders, kept, status)
            if stopped:
                state = state.replace(status=place_rows(status, session.placement))
            finished = not (status == RUNNING).any()
            if finished and learned is not None:
                learned.end(state)
            yield Snapshot(
                index=index,
                status=status[: len(index)],
                lengths=lengths[: len(index)],
                kept=kept.copy(),
                finished=finished,
                prefill_s=prefill_s,
                decode_s=decode_s,
                seen=jax.tree.map(np.asarray, now) if finished else now,
            )
            if not (finished or ahead):
                begin = time.perf_counter()
                state, seen = step(state)
    finally:
        # A caller that stops here measures other things next.
        jax.block_until_ready(seen)


def _stop(
    session: Session,
    index: list[int],
    seen: Seen,
    finders: dict[int, StopFinder],
    kept: np.ndarray,
    status: np.ndarray,
) -> bool:
    """Whether a row's new text has a stop string; `kept`, `status` and `finders` are updated."""
    stopped = False
    for row, finder in list(finders.items()):
        first, length = len(session.prompts[index[row]]), int(seen.lengths[row])
        new = np.asarray(seen.tokens)[row, first + finder.count : length]
        if (count := finder.find(new.tolist())) is not None:
            kept[row], status[row], stopped = count, STOPPED, True
            del finders[row]
    return stopped


def expected_acceptance(session: Session) -> metrics.ExpectedAcceptance:
    """The acceptance that this session's own distributions imply, with its standard error.

    Decodes once more, recording sum_x min(p, q) at every node that `rejection` puts to the test.
    """
    recording = replace(session, plan=replace(session.plan, overlaps=True))
    batches = [snapshot for snapshot in run_session(recording) if snapshot.finished]
    return metrics.expected_acceptance(np.concatenate([s.overlaps for s in batches]))
