"""Rounds of a recorded row, computed again outside the compiled loop, with every draw.

The state before a round comes from an engine's own programs for one row, run from the prompt round
by round with the recorded draft lengths. The draft is proposed and verified by the loop's functions
under the row's own keys; a wrapper around the plan's rule keeps the distributions that the rule
is given. The tokens that a round emits are compared with the recorded ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax import sampling
from specjax.apps.playground.draft_tests import DraftTest, Likeliest, decided
from specjax.core.drafter import StepLimits
from specjax.core.plan import LoopPlan
from specjax.core.round import noise_keys, propose
from specjax.core.state import State
from specjax.core.verify import as_drafted, verify_draft
from specjax.distributed.sharding import use
from specjax.engine.generate import Generation
from specjax.engine.outputs import Output
from specjax.engine.plan import DecodePlan
from specjax.engine.programs import Programs, compile_plan, row_arguments
from specjax.engine.requests import Request
from specjax.errors import InputError
from specjax.sampling import Drafted, Rule, Target
from specjax.trees import Draft


@dataclass(frozen=True)
class RecordedRow:
    """The record of a row in a run: its new tokens, and the counts of each of its rounds."""

    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    drafter_index: tuple[int, ...]

    @classmethod
    def of(cls, result: Generation, row: int) -> RecordedRow:
        """Return the record of a row of a result of `generate`."""
        active = result.emitted[row] >= 0
        tables = (result.drafted, result.accepted, result.emitted, result.drafter)
        counts = (tuple(table[row][active].tolist()) for table in tables)
        return cls(tuple(result.token_ids[row]), *counts)

    @classmethod
    def of_output(cls, output: Output) -> RecordedRow:
        """Return the record of a request's output in an engine."""
        rounds = output.rounds
        counts = (rounds.drafted, rounds.accepted, rounds.emitted, rounds.drafter)
        return cls(tuple(output.token_ids), *(tuple(part.tolist()) for part in counts))

    def tokens_of(self, number: int) -> tuple[int, ...]:
        """Return the tokens that round `number` emitted."""
        first = sum(self.emitted[:number])
        return self.token_ids[first : first + self.emitted[number]]


@dataclass(frozen=True)
class RoundTrace:
    """One round of a row.

    `position` is the number of tokens committed before the round, and `root` the last of them, in
    slot 0. Slot i + 1 holds draft token i, whose parent is slot `parents[i]`; of drafters whose
    drafts are merged, `drafted_by[i]` proposed it. `path` are the accepted slots; `next_token`
    follows them, drawn from `next_source` ("target" or "residual"). `emitted` are
    the tokens of the repeated round; `problems` say where they differ from the `recorded` ones, or
    do not follow from the draws.
    """

    number: int
    position: int
    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    valid: tuple[bool, ...]
    drafted_by: tuple[int, ...]
    path: tuple[int, ...]
    tests: tuple[DraftTest, ...]
    next_token: int
    next_source: str
    next_likeliest: Likeliest
    emitted: tuple[int, ...]
    recorded: tuple[int, ...]
    problems: tuple[str, ...]


def replay_round(
    plan: DecodePlan, request: Request, recorded: RecordedRow, number: int
) -> RoundTrace:
    """Return round `number` (0, 1, ...) of the row of a request.

    Raises InputError if the row has no such round, or if an earlier round differs from the record.
    """
    if not 0 <= number < len(recorded.emitted):
        raise InputError(f"round={number}: the row has {len(recorded.emitted)} rounds")
    traces = list(islice(replay_rounds(plan, request, recorded), number, number + 1))
    if not traces:
        raise InputError(f"round={number}: an earlier round differs from the record")
    return traces[0]


def replay_rounds(
    plan: DecodePlan, request: Request, recorded: RecordedRow
) -> Iterator[RoundTrace]:
    """Yield the rounds of a request's row, up to the first one that differs from the record.

    `request` has the number that it had in the recorded run, from which its key derives.
    """
    # Pages change where keys are, and none of them.
    loop_plan = replace(plan.loop, page_size=None, num_pages=0)
    plan = replace(plan.with_options(batch_size=1), loop=loop_plan)
    loop_plan, params, programs = plan.loop, plan.params, compile_plan(plan)
    state = _prefilled(plan, request, programs)
    ended, one = np.zeros(plan.num_rows, bool), np.int32(1)
    for number in range(len(recorded.emitted)):
        with use(plan.mesh):
            limits = _recorded_limits(loop_plan, params, state, recorded, number)
            draft, kept = verify_and_keep(loop_plan, params, state, limits)
        keys = noise_keys(loop_plan, params[1], state)
        trace = _trace(loop_plan.rule, keys, state, draft, kept, number)
        state, packed = programs.step(params, state, limits, ended, one, one, None)
        seen = packed.read()
        columns = seen.rounds.drafted, seen.rounds.accepted, seen.rounds.emitted
        drafted, accepted, count = (int(column[0, 0]) for column in columns)
        trace = replace(trace, emitted=tuple(seen.tokens[0, :count].tolist()))
        trace = _compared(trace, recorded, drafted, accepted)
        yield trace
        if trace.problems:
            return


def _prefilled(plan: DecodePlan, request: Request, programs: Programs) -> State:
    """Return the state of a single row after its prompt was read, by the plan's programs."""
    params, count = plan.params, plan.prefill_rows
    state = programs.empty(params, *row_arguments(plan, []))
    slots, cached = np.zeros(count, np.int32), np.zeros(count, np.int32)
    state, new = programs.new(params, state, slots, cached, *row_arguments(plan, [request], count))
    end = np.int32(len(request.prompt) - 1)
    state, new, _ = programs.read(params, state, new, slots, None, np.int32(0), end)
    where = np.where(np.arange(count) == 0, 0, plan.num_rows).astype(np.int32)
    return programs.admit(state, where, where, new)[0]


class Kept(NamedTuple):
    """A verification, with the target's log-probabilities that the rule was given."""

    path_slots: Int[Array, "B P"]
    num_accepted: Int[Array, "B"]
    next_token: Int[Array, "B"]
    target: Float[Array, "B W V"]


@dataclass(frozen=True)
class _Keeping(Rule):
    """A wrapper of a rule that returns the target's log-probabilities of all slots, too."""

    rule: Rule

    name = property(lambda self: self.rule.name)
    position_noise = property(lambda self: self.rule.position_noise)
    needs_logq = property(lambda self: self.rule.needs_logq)
    takes_trees = property(lambda self: self.rule.takes_trees)

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Any:
        """Return the wrapped rule's verification with the target's log-probabilities."""
        verification = self.rule.verify(keys, drafted, target)
        slots = jnp.arange(drafted.tokens.shape[1] + 1, dtype=drafted.num_valid.dtype)
        every = jax.vmap(
            lambda slot: target.distributions(jnp.full_like(drafted.num_valid, slot)), out_axes=1
        )
        return Kept(*verification, every(slots))


@functools.partial(jax.jit, static_argnums=0)
def verify_and_keep(
    loop_plan: LoopPlan, params: Any, state: State, limits: StepLimits
) -> tuple[Draft, Kept]:
    """Propose and verify a round's draft as the loop does, at the largest width."""
    loop_plan = replace(loop_plan, rule=_Keeping(loop_plan.rule))
    # At the widest width all layers run: with these limits the drafter may not have.
    draft = propose(loop_plan, params, state, limits).draft.replace(partial=None)
    keys = noise_keys(loop_plan, params[1], state)
    verified = verify_draft(loop_plan, params[0], state, draft, keys, draft.topology.width)
    return draft, verified.verification


def _recorded_limits(
    loop_plan: LoopPlan, params: Any, state: State, recorded: RecordedRow, number: int
) -> StepLimits:
    """Return limits under which the recorded drafter drafts as many nodes as in round `number`."""
    none = np.zeros(len(loop_plan.drafter.parts), np.int32)
    limits = StepLimits(none, np.zeros(len(none), np.float32))
    drafter, count = recorded.drafter_index[number], recorded.drafted[number]
    if count == 0:
        return limits
    if not 0 <= drafter < len(none):
        raise InputError(f"round={number}: drafter {drafter} is recorded, of {len(none)} drafters")
    most = loop_plan.drafter.parts[drafter].num_nodes
    full = StepLimits(np.where(np.arange(len(none)) == drafter, most, 0), limits.confidence)
    draft, _ = verify_and_keep(loop_plan, params, state, jax.tree.map(jnp.asarray, full))
    # Nodes may be invalid below the limit, for example in a tree with fewer matches.
    enough = np.flatnonzero(np.cumsum(np.asarray(draft.valid)[0]) >= count)
    longest = most if not len(enough) else int(enough[0]) + 1
    return limits.replace(longest=np.minimum(full.longest, longest).astype(np.int32))


def _trace(
    rule: Rule, keys: Key[Array, "1"], state: State, draft: Draft, kept: Kept, number: int
) -> RoundTrace:
    """Return the trace of a verified draft, before it is compared with the record."""
    drafted = as_drafted(draft, draft.topology)
    verification = sampling.Verification(*kept[:3])
    decision = decided(rule, keys, drafted, kept.target[0], state.length, verification)
    position, accepted = int(state.length[0]), int(kept.num_accepted[0])
    drafted_by = draft.drafted_by
    if drafted_by is None:
        drafted_by = np.zeros(draft.tokens.shape, int)
    return RoundTrace(
        number=number,
        position=position,
        root=int(state.tokens[0, position - 1]),
        tokens=tuple(np.asarray(draft.tokens)[0].tolist()),
        parents=tuple(np.asarray(drafted.parent_slots)[0].tolist()),
        valid=tuple(np.asarray(draft.valid)[0].tolist()),
        drafted_by=tuple(np.asarray(drafted_by)[0].tolist()),
        path=tuple(np.asarray(kept.path_slots)[0, :accepted].tolist()),
        tests=decision.tests,
        next_token=int(kept.next_token[0]),
        next_source=decision.next_source,
        next_likeliest=decision.next_likeliest,
        emitted=(),
        recorded=(),
        problems=decision.problems,
    )


def _compared(trace: RoundTrace, recorded: RecordedRow, drafted: int, accepted: int) -> RoundTrace:
    """Return the trace with the recorded tokens, and with any differences among its problems.

    `drafted` and `accepted` are the counts of the repeated round.
    """
    number = trace.number
    problems = list(trace.problems)
    tokens = recorded.tokens_of(number)
    whole = (*(trace.tokens[slot - 1] for slot in trace.path), trace.next_token)
    compared = {
        "drafted tokens": (drafted, recorded.drafted[number]),
        "accepted tokens": (accepted, recorded.accepted[number]),
        "emitted tokens": (trace.emitted, tokens),
        "tokens of the loop": (trace.emitted, whole[: len(trace.emitted)]),
    }
    problems += [
        f"{name}: {here} computed again, {there} recorded"
        for name, (here, there) in compared.items()
        if here != there
    ]
    return replace(
        trace,
        recorded=tokens,
        problems=tuple(problems),
    )
