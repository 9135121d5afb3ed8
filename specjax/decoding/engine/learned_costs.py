"""What an engine with "auto" learns of costs and acceptance, on the host."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from specjax.decoding.engine.next_step import SLEEPING_ROUNDS_OF_LOOKUPS, NextStep
from specjax.decoding.setup import Setup
from specjax.decoding.state import State
from specjax.distributed import processes
from specjax.distributed.sharding import fetch, first_device
from specjax.draft_length.cost_filter import CostFilter
from specjax.draft_length.cost_measurement import Measurement, RoundKind
from specjax.draft_length.policy import Costs, Policy, new_policy
from specjax.errors import InputError
from specjax.files.measured_seconds import keep_seconds, read_seconds, seconds_file
from specjax.models.layers.attention import CACHE_BLOCK

_CHECKED_ROUNDS = 4
"""Rounds without drafts that are timed, where none come by themselves: else nothing corrects what
they are believed to cost, and a plain round that is believed too dear makes drafts seem to pay."""
_DOUBTS = 2.0
"""They come where drafting would not pay if the figure of a plain round were off by so many
standard deviations."""
_PLAIN_AGAIN_SHARE = 0.02
"""What they cost is at most this share of the time since plain rounds were timed."""
_LEAST_GAIN = 0.1
"""The least share of a round that drafting is taken to gain, when that cost is reckoned."""
_MIX_MEMORY = 0.8
"""How much of its weight a step's work keeps to the next."""
_TRUSTED_S = 600.0
"""The age in seconds up to which kept figures are used without a check."""


@dataclass
class LearnedCosts:
    """Costs, and what became of draft tokens.

    Where no earlier process has measured the same work here in the last ten minutes, the first
    rounds do: `measurement` is theirs until they are done, and until then `estimate` is what was
    kept, or None. `measure_s` are the seconds of all such rounds of the engine. `key` says what the
    figures are of (None: of whatever is decoded), `committed` are the tokens of the longest prompt,
    and `measured_at` says when they were measured, in seconds since 1970. `next_step` is the
    program that runs next, and for how long.
    """

    estimate: CostFilter | None
    file: Path | None
    measurement: Measurement | None = None
    key: tuple[Any, ...] | None = None
    committed: int = 1
    measure_s: float = 0.0
    policy: Policy | None = None
    measured_at: float | None = None
    guessed: bool = False
    """Whether some of the figures are no more than a guess, which nobody else is to begin with."""
    next_step: NextStep = field(default_factory=NextStep)
    _checks_plain: bool = False
    """Whether the rounds of the next step have no drafts, to be timed."""
    _since: float = 0.0
    """Seconds since a step that timed plain rounds: one of the plain program, or, where there is
    none, a step in which a quarter of the rounds, or more, had width 1."""
    _mix: Float[np.ndarray, "parts"] | float = 0.0
    """How often each part ran in the last steps."""

    @classmethod
    def of_setup(
        cls, setup: Setup, committed: int, before: LearnedCosts | None = None
    ) -> LearnedCosts:
        """With the figures that are kept of the same work here, or with none yet.

        `committed` are the tokens of the longest prompt. Where nothing is kept, the figures that
        the engine had of other work `before` are measured again, as old ones would be. All
        processes get what the first one has.
        """
        key = costs_key(setup, committed)
        file = seconds_file(*key, device=first_device(setup.placement))
        num_widths, parts = len(setup.plan.widths), setup.plan.drafter.parts
        count = num_widths + 3 * len(parts)
        kept = processes.from_first(read_seconds(file, count) if processes.is_first() else None)
        longest = [part.num_nodes for part in parts]
        costs = cls(None, file, key=key, committed=committed)
        if any(part.looks_up for part in parts):
            costs.next_step.most_plain_rounds = SLEEPING_ROUNDS_OF_LOOKUPS
        if kept is None:
            known = None if before is None else before.known_seconds
            costs.measurement = Measurement(num_widths, longest, known)
            return costs
        seconds, costs.measured_at = kept
        costs.estimate = CostFilter(seconds, num_widths)
        if not processes.from_first(0 <= time.time() - costs.measured_at <= _TRUSTED_S):
            costs.measurement = Measurement(num_widths, longest, seconds)
        return costs

    @property
    def known_seconds(self) -> Float[np.ndarray, "parts"] | None:
        """The figures as far as they are known: also those that are being measured again."""
        if self.guessed:
            return None
        if self.estimate is not None:
            return self.estimate.seconds
        return None if self.measurement is None else self.measurement.known

    def rounds(self, most: int) -> int:
        """How many rounds the next step has: at most `most`, and one where it is measured."""
        if self.measurement is not None:
            return 1
        if self._checks_plain:
            return min(most, _CHECKED_ROUNDS)
        return min(most, self.next_step.rounds)

    def begin(self, state: State) -> State:
        """A state that nothing was decoded in, with what is known."""
        if self.policy is not None:
            # The first step takes the state's buffers over, and a caller may not see its end.
            state = state.replace(policy=jax.tree.map(jnp.copy, self.policy))
        self.next_step.begin()
        if self.measurement is not None:
            return self._begin_kind(state, self.measurement.next)
        self._checks_plain = False
        return _put_free(_put_policy(state, costs=self.costs()))

    def take_over(self, before: LearnedCosts) -> None:
        """Have what others `before` learned that is no figure: of acceptance, after their `end`."""
        self.policy, self.measure_s = before.policy, before.measure_s

    def begin_anew(self, state: State) -> State:
        """A state whose rows decode on, with what is known here and nothing that it had learned."""
        fresh = _fresh_policy(state)
        parts = {one.name: getattr(fresh, one.name) for one in fields(fresh)}
        history = jax.tree.map(lambda part: jax.device_put(0 * part, part.sharding), state.history)
        return self.begin(_put_policy(state, **parts).replace(history=history))

    def after_step(
        self, state: State, seconds: float, drafts: bool | None = None, has_room: bool = False
    ) -> State:
        """The state after some rounds that took `seconds`, with the costs corrected by them.

        `drafts` says whether a drafter would draft in the next round, and `has_room` whether none
        has to observe first; `drafts` is None where plain rounds have no program of their own.
        Raises InputError where the clock does not move.
        """
        seconds = processes.from_first(seconds)
        work = fetch(state.policy.work)
        state = _put_policy(state, work=jax.tree.map(np.zeros_like, work))
        self.next_step.has_room = has_room
        if self.measurement is None:
            knows_plain = self.next_step.plain
            if drafts is None:
                knows_plain = bool(4 * work.passes[0] >= work.passes.sum())
                self.next_step.draft_long()
            elif not self._checks_plain:
                few = bool(2 * work.passes[0] > work.passes.sum())
                self.next_step.choose(drafts=drafts, few=few)
            # Partial passes say nothing of what whole ones cost.
            timed_plain = knows_plain and not work.partial
            self._since = 0.0 if timed_plain else self._since + seconds
            if work.partial:
                return state
            state = self._corrected(state, work.counts(), seconds)
            can_check = drafts is None or has_room
            return self._check_plain(state, possible=can_check and not knows_plain)
        self.measurement.add(seconds, work)
        self.measure_s += seconds
        if (kind := self.measurement.next) is not None:
            return self._begin_kind(state, kind)
        self.next_step.take(drafts=True)
        return self._measured(state)

    def _measured(self, state: State) -> State:
        """The state after the measurement, whose figures are kept. Raises InputError."""
        figures = self.measurement.figures()
        self.estimate = CostFilter(figures.seconds, self.measurement.num_widths, figures.spread)
        self.measurement, self.measured_at = None, time.time()
        self.guessed = not figures.complete
        self.save()
        # What was drafted to measure says nothing of how fast the batch is.
        free = _fresh_policy(state)
        state = _put_policy(state, costs=self.costs(), earned=free.earned, spent=free.spent)
        return _put_free(state)

    def _corrected(self, state: State, ran: Float[np.ndarray, "parts"], seconds: float) -> State:
        """The state with costs that fit a step in which each part `ran` so often."""
        if not ran.any():
            return state
        self._mix = _MIX_MEMORY * self._mix + ran
        before = self._mix @ self.estimate.seconds / self.estimate.seconds[0]
        self.estimate.update(ran, seconds)
        # Sums may differ in the last bit between machines, and processes are to decide alike.
        self.estimate.seconds = np.array(processes.from_first(self.estimate.seconds.tolist()))
        after = self._mix @ self.estimate.seconds / self.estimate.seconds[0]
        # What was spent is in plain rounds: where only these are corrected, it is to follow.
        spent = fetch(state.policy.spent) * after / before
        return _put_policy(state, costs=self.costs(), spent=spent)

    def _check_plain(self, state: State, *, possible: bool) -> State:
        """The state with rounds without drafts next, where it is time that some are timed."""
        if self._checks_plain:
            self._checks_plain = False
            self.next_step.take(drafts=True)
            return _put_free(state)
        earned, spent = fetch((state.policy.earned, state.policy.spent))
        gained = 1 - min(float(spent / earned), 1.0)
        lost = _CHECKED_ROUNDS * self.estimate.seconds[0] * max(gained, _LEAST_GAIN)
        doubt = _DOUBTS * self.estimate.plain_doubt(self._mix)
        due = lost <= _PLAIN_AGAIN_SHARE * self._since and gained <= doubt
        if not processes.from_first(bool(due and possible)):
            return state
        self._checks_plain = True
        return self._begin_kind(state, RoundKind(0, (0,) * state.policy.forced.shape[0]))

    def _begin_kind(self, state: State, kind: RoundKind) -> State:
        """The state with its next rounds of a kind that is to be timed."""
        self.next_step.take(drafts=kind.narrowest > 0 or any(kind.lengths))
        return _put_kind(state, kind)

    def end(self, state: State) -> None:
        """Keep what a state has shown of acceptance, for the next one.

        Of a measurement that rows were too short for, what it has is taken once it is enough.
        """
        if self.measurement is not None and self.measurement.enough:
            with suppress(InputError):
                state = self._measured(state)
        self.policy = state.policy

    def costs(self) -> Costs:
        """The figures as they are now; not before they are measured."""
        return self._costs(self.estimate.seconds)

    def first_costs(self) -> Costs:
        """The figures as they were when they were measured, or read."""
        return self._costs(self.estimate.first)

    def _costs(self, seconds: Float[np.ndarray, "parts"]) -> Costs:
        passes, others = np.split(seconds, [self.estimate.num_widths])
        return Costs(passes, *np.split(others, 3))

    def save(self) -> None:
        """Keep the figures for later processes; where that fails, they measure again."""
        if self.estimate is not None and not self.guessed and processes.is_first():
            keep_seconds(self.file, self.estimate.seconds.tolist(), self.measured_at)


def _fresh_policy(state: State) -> Policy:
    """A policy of the shapes of the state's that knows nothing."""
    known = state.policy.survival
    sizes = *known.tested.shape[:2], known.proposed.shape[1]
    return new_policy(*sizes, len(state.policy.costs.passes))


def _put_policy(state: State, **parts: Any) -> State:
    """The state with other parts of its policy, each where the one before was placed."""

    def put(new: Any, old: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(new, old.dtype), old.sharding)

    policy = state.policy
    new = {name: jax.tree.map(put, part, getattr(policy, name)) for name, part in parts.items()}
    return state.replace(policy=policy.replace(**new))


def _put_kind(state: State, kind: RoundKind) -> State:
    """The state with its next round of a kind that is to be timed."""
    return _put_policy(state, forced=np.asarray(kind.lengths), narrowest=np.int32(kind.narrowest))


def _put_free(state: State) -> State:
    """The state with its next round as is best."""
    free = _fresh_policy(state)
    return _put_policy(state, forced=free.forced, narrowest=free.narrowest)


def costs_key(setup: Setup, committed: int) -> tuple[Any, ...]:
    """What figures depend on beside the machine; the longest prompt has `committed` tokens.

    Attention reads whole blocks, so that shorter prompts than a block are alike.
    """
    plan = setup.plan
    return (
        setup.mesh and tuple(setup.mesh.shape.items()),
        plan.target,
        plan.drafter,
        plan.rule,
        plan.widths,
        plan.flags,
        plan.logprobs,
        plan.overlaps,
        plan.plain_program,
        plan.partial_rows,
        setup.num_rows,
        max(committed, CACHE_BLOCK - 1).bit_length(),
    )
