"""Drafters that take turns, and that sleep while they do not draft.

In each row the first drafter with a draft has the turn. A drafter works only in rounds in which
some row may draft with it: what was committed meanwhile is observed before it proposes again, or
when no more of the target's features can be kept. A single drafter is a tuple of one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.distributed.sharding import constrain
from specjax.draft_length.survival import UNKNOWN
from specjax.drafters.base import Accepted, Context, Drafter, LoadedDrafter, Noise, TargetPass
from specjax.drafters.none import empty_draft
from specjax.errors import InputError
from specjax.sampling import drafter_noise
from specjax.trees import Draft, DynamicTopology, chain_topology

NO_DRAFTER = -1
"""The number of the drafter of a row without a draft."""
INT32_MAX = np.iinfo(np.int32).max
_KEPT_ROUNDS = 8
"""Rounds of full drafts whose features are kept for drafters that sleep."""


@struct.dataclass
class PartState:
    """A drafter's own state, and how many of each row's latest tokens it has not observed."""

    drafter: Any
    unobserved: Int[Array, "B"]


class Proposal(NamedTuple):
    """What drafters in turn propose.

    `drafter` is the number of the one that drafted in each row, or `NO_DRAFTER`. `first` says which
    drafters ran, `further` how often each ran after its first token, and `catch_up` how many wide
    passes each made over what it had missed.
    """

    draft: Draft
    state: tuple[PartState, ...]
    drafter: Int[Array, "B"]
    first: Int[Array, "drafters"]
    further: Int[Array, "drafters"]
    catch_up: Int[Array, "drafters"]


class Intention(NamedTuple):
    """What the drafters would do in the next round.

    `drafts` says whether any of them would draft. Lookups are run to find out: `ran` are those that
    were, and `found` those of them that have a draft. `room` is how many tokens each row may commit
    before a drafter has to observe them, or it loses features.
    """

    drafts: Bool[Array, ""]
    room: Int[Array, ""]
    ran: Bool[Array, "drafters"]
    found: Bool[Array, "drafters"]


@dataclass(frozen=True)
class Turns:
    """Drafters in the order in which they may draft; parameters and states are tuples like it.

    Exact if each drafter is: what one's choice to draft depends on (tokens that it does not draw,
    distributions, noise of its own) is independent of what the next one draws.
    """

    parts: tuple[Drafter, ...]

    @property
    def name(self) -> str:
        """The drafters' names, joined by +."""
        return "+".join(part.name for part in self.parts)

    @property
    def num_speculative_tokens(self) -> int:
        """The longest path that any of them drafts (P)."""
        return max(part.num_speculative_tokens for part in self.parts)

    @property
    def num_nodes(self) -> int:
        """The nodes of every draft (N)."""
        return max(part.num_nodes for part in self.parts)

    @property
    def features(self) -> tuple[str, ...]:
        """The target's features that any of them reads."""
        drafting = [part for part in self.parts if part.num_speculative_tokens]
        return tuple(dict.fromkeys(name for part in drafting for name in part.features))

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The target's features that any of them reads of each pass."""
        drafting = [part for part in self.parts if part.num_speculative_tokens]
        return tuple(dict.fromkeys(name for part in drafting for name in part.pass_features))

    @property
    def sampled(self) -> bool:
        """Whether any of them draws its drafts."""
        return any(part.sampled for part in self.parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Draft lengths worth a compiled width; empty where a single drafter names none."""
        if len(self.parts) == 1:
            return self.parts[0].lengths
        return tuple(
            length for part in self.parts for length in (part.lengths or (part.num_nodes,))
        )

    @property
    def kept_features(self) -> int:
        """How many positions the loop keeps features of; 0 where no drafter reads any."""
        longest = max(part.num_speculative_tokens for part in self.parts)
        return _KEPT_ROUNDS * (longest + 1) if self.features else 0

    def limited(self, length: int) -> Turns:
        """The same drafters, none with drafts longer than `length`; a single one with just that."""
        if len(self.parts) == 1:
            return Turns((replace(self.parts[0], num_speculative_tokens=length),))
        return Turns(
            tuple(
                replace(part, num_speculative_tokens=min(part.num_speculative_tokens, length))
                for part in self.parts
            )
        )

    def init(self, params: tuple, batch: int, capacity: int) -> tuple[PartState, ...]:
        """Empty rows."""
        return tuple(
            PartState(
                part.init(own, batch, capacity),
                constrain(jnp.zeros(batch, jnp.int32), "batch"),
            )
            for part, own in zip(self.parts, params, strict=True)
        )

    def observe_prompt(
        self, params: tuple, state: tuple[PartState, ...], context: Context, accepted: Accepted
    ) -> tuple[PartState, ...]:
        """Each drafter's state after a chunk of the prompts."""
        return tuple(
            before.replace(drafter=part.observe(own, before.drafter, context, accepted))
            if part.num_speculative_tokens
            else before
            for part, own, before in zip(self.parts, params, state, strict=True)
        )

    def observe_pass(
        self, params: tuple, state: tuple[PartState, ...], target_pass: TargetPass
    ) -> tuple[PartState, ...]:
        """The states after a pass of the target."""
        return tuple(
            before.replace(drafter=part.observe_pass(own, before.drafter, target_pass))
            if part.num_speculative_tokens and part.pass_features
            else before
            for part, own, before in zip(self.parts, params, state, strict=True)
        )

    def commit(self, state: tuple[PartState, ...], count: Int[Array, "B"]) -> tuple[PartState, ...]:
        """The states after a round that committed `count` tokens, which wait to be observed."""
        return tuple(
            before.replace(unobserved=constrain(before.unobserved + count, "batch"))
            if part.observes and part.num_speculative_tokens
            else before
            for part, before in zip(self.parts, state, strict=True)
        )

    def propose(
        self, params: tuple, state: tuple[PartState, ...], context: Context, noise: Noise
    ) -> Proposal:
        """Each row's draft from the first drafter that has one, and the states.

        `noise` is asked at a depth of its own for each drafter, so that none knows what another
        one draws from; where a rule reads no distributions, all share the target's own.
        """
        drafter = jnp.full(context.length.shape, NO_DRAFTER, jnp.int32)
        decided = jnp.int32(0)
        draft, states, first, further, catch_up = None, [], [], [], []
        for number, part in enumerate(self.parts):
            limit = jnp.minimum(context.limit, part.num_speculative_tokens)
            limit = jnp.where(drafter == NO_DRAFTER, limit, 0)
            if context.replay is not None:
                limit = jnp.where(context.replay.drafter == number, limit, 0)
                if not part.branches:
                    limit = jnp.minimum(limit, context.replay.drafted)
            own = context.replace(limit=limit)
            if context.decisions is not None:
                missed = _wide_passes(part, state[number])
                own = _decided_before(part, number, own, decided, missed)
            ran = jnp.any(own.limit > 0)
            new, after, passes = _take_turn(
                part, params[number], state[number], own, self._noise(number, noise, context)
            )
            new = new.replace(valid=new.topology.close(new.valid))
            if context.replay is not None:
                kept = jnp.cumsum(new.valid, axis=1) <= context.replay.drafted[:, None]
                new = new.replace(valid=new.valid & kept)
            if context.decisions is not None:
                new, length = _decided_after(part, own, new)
                # Whether there is a draft at all is known before any token of it is drawn.
                decided = jnp.maximum(decided, jnp.where(new.valid.any(), length, 0))
            drafted = new.valid.any(axis=1)
            drafter = jnp.where(drafted & (drafter == NO_DRAFTER), number, drafter)
            states.append(after)
            first.append(ran)
            # All of a tree is drafted, however many nodes of it are kept.
            more = new.steps
            if more is None:
                more = jnp.maximum(new.valid.sum(axis=1).max() - 1, 0)
            further.append(jnp.int32(0) if part.branches else more)
            catch_up.append(passes)
            draft = new if draft is None else joined(draft, new, self.num_nodes)
        return Proposal(
            draft,
            tuple(states),
            drafter,
            jnp.stack(first).astype(jnp.int32),
            jnp.stack(further).astype(jnp.int32),
            jnp.stack(catch_up),
        )

    def intend(
        self, params: tuple, state: tuple[PartState, ...], context: Context, noise: Noise
    ) -> Intention:
        """Whether any drafter would draft now; lookups are run to find out, others are not.

        The states do not change.
        """
        drafts, ran, found = jnp.bool_(False), [], []
        for number, part in enumerate(self.parts):
            limit = jnp.minimum(context.limit, part.num_speculative_tokens)
            missed = _wide_passes(part, state[number])
            own = context.replace(limit=limit)
            own = _decided_before(part, number, own, jnp.int32(0), missed)
            runs = jnp.any(own.limit > 0)
            if part.looks_up:
                draft, *_ = _take_turn(part, params[number], state[number], own, noise)
                draft = draft.replace(valid=draft.topology.close(draft.valid))
                has_draft = jnp.any(_decided_after(part, own, draft)[0].valid)
            else:
                has_draft = runs & (own.length_decision.planned > 0)
            drafts |= has_draft
            ran.append(runs & part.looks_up)
            found.append(has_draft & part.looks_up)
        return Intention(drafts, self.room(state, context), jnp.stack(ran), jnp.stack(found))

    def room(self, state: tuple[PartState, ...], context: Context) -> Int[Array, ""]:
        """How many tokens each row may commit before a drafter has to observe them.

        `INT32_MAX` where none reads features, and 0 where one would observe in the next round.
        """
        room = jnp.int32(INT32_MAX)
        for part, own in zip(self.parts, state, strict=True):
            if part.features and part.num_speculative_tokens:
                left = _room(own, context)
                left = jnp.where(left < context.longest_commit, 0, left)
                room = jnp.minimum(room, left)
        return room

    def _noise(self, number: int, noise: Noise, context: Context) -> Noise:
        return drafter_noise(noise, number, len(self.parts)) if context.needs_logq else noise


@dataclass(frozen=True)
class SleepingTurns(Turns):
    """The same drafters with the same states in rounds that nobody drafts in."""

    @property
    def num_speculative_tokens(self) -> int:
        """Nothing is drafted."""
        return 0

    @property
    def num_nodes(self) -> int:
        """Nothing is drafted."""
        return 0

    def propose(
        self, params: tuple, state: tuple[PartState, ...], context: Context, noise: Noise
    ) -> Proposal:
        """No draft, and the states as they are."""
        del params, noise
        batch, parts = context.length.shape[0], jnp.zeros(len(self.parts), jnp.int32)
        nobody = jnp.full(batch, NO_DRAFTER, jnp.int32)
        return Proposal(empty_draft(batch, 0), state, nobody, parts, parts, parts)


def take_turns(*drafters: LoadedDrafter | Drafter) -> LoadedDrafter:
    """One drafter of several: in each row the first that has a draft, else the next one's."""
    loaded = [one if isinstance(one, LoadedDrafter) else LoadedDrafter(one) for one in drafters]
    parts: tuple[Drafter, ...] = ()
    params: tuple = ()
    for one in loaded:
        inside = isinstance(one.drafter, Turns)
        parts += one.drafter.parts if inside else (one.drafter,)
        params += tuple(one.params) if inside else (one.params,)
    return LoadedDrafter(Turns(parts), params)


def _decided_before(
    part: Drafter,
    number: int,
    context: Context,
    decided: Int[Array, ""],
    catch_up: Int[Array, ""],
) -> Context:
    """A drafter's context with its length decision, and limits that this allows before any draft.

    `decided` is the longest draft that was decided on in other rows, `catch_up` the wide passes
    that the drafter has to make over what it missed.
    """
    decisions = context.decisions
    nodes = part.num_nodes if part.branches else None
    decision = decisions.decide_length(number, context.limit, decided, catch_up, tree_nodes=nodes)
    if part.branches:
        limit = jnp.where(decision.worth_running, context.limit, 0)
    elif part.decides:
        limit = jnp.where(decision.planned > 0, context.limit, 0)
    elif part.sampled:
        limit = jnp.minimum(context.limit, decision.planned)
    else:
        limit = jnp.where(decision.worth_running, context.limit, 0)
    return context.replace(limit=limit, length_decision=decision.replace(limit=limit))


def _decided_after(part: Drafter, context: Context, draft: Draft) -> tuple[Draft, Int[Array, ""]]:
    """The draft, and the length that was decided on before any of its tokens was drawn.

    Of a draft that nothing was drawn for only what pays is kept, and of a drawn tree what was
    planned: a chain is not drawn further than that. Without confidences the nodes of a tree differ
    by their numbers, the tokens of a chain by nothing.
    """
    decision, count = context.length_decision, draft.topology.num_nodes
    if not count or (not part.branches and (part.decides or part.sampled)):
        return draft, decision.planned
    if draft.logq is not None:
        length = decision.planned
    else:
        confidence = draft.confidence
        if confidence is None and not part.branches:
            confidence = jnp.full(draft.valid.shape, UNKNOWN)
        length = decision.best_of_draft(confidence, draft.valid, draft.topology)
    return draft.replace(valid=draft.valid & (jnp.arange(count)[None, :] < length)), length


def _take_turn(
    part: Drafter, params: Any, state: PartState, context: Context, noise: Noise
) -> tuple[Draft, PartState, Int[Array, ""]]:
    """What a drafter proposes, its state, and the wide passes over what it had missed.

    Where no row may draft it proposes nothing, and is not run.
    Raises InputError for a draft of another size than the drafter says.
    """
    passes = jnp.int32(0)
    if not part.num_speculative_tokens:
        return empty_draft(context.length.shape[0], 0), state, passes
    wanted = jnp.any(context.limit > 0)
    if part.observes:
        state, passes = _catch_up(part, params, state, context, wanted)

    # Compiled as a part of the whole, but traced once for both uses.
    @functools.partial(jax.jit, inline=True)
    def propose(inner: Any) -> tuple[Draft, Any]:
        return part.propose(params, inner, context, noise)

    shapes, _ = jax.eval_shape(propose, state.drafter)
    check_size(part, shapes)

    def sleep(inner: Any) -> tuple[Draft, Any]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), inner

    draft, inner = lax.cond(wanted, propose, sleep, state.drafter)
    return draft, state.replace(drafter=inner), passes


def check_size(part: Drafter, draft: Draft) -> None:
    """Raise InputError for a draft of another size than its drafter says, which sizes the pass."""
    count = draft.topology.num_nodes
    if count != part.num_nodes:
        raise InputError(
            f"drafter {part.name!r}: proposes a tree of {count} nodes where its num_nodes is "
            f"{part.num_nodes}; propose that many, those that are not there invalid"
        )


def _widths(part: Drafter) -> tuple[int, int]:
    """Tokens of a wide pass over what a drafter missed, and of one over a round's."""
    narrow = part.num_speculative_tokens + 1
    return _KEPT_ROUNDS * narrow, narrow


def _wide_passes(part: Drafter, state: PartState) -> Int[Array, ""]:
    """The wide passes that a drafter would have to make before it drafts."""
    wide, narrow = _widths(part)
    return -(-jnp.maximum(state.unobserved.max() - narrow, 0) // wide)


def _room(state: PartState, context: Context) -> Int[Array, ""]:
    """How many tokens each row may commit before the drafter loses features."""
    kept = next(iter(context.features.values())).shape[1]
    return kept - state.unobserved.max()


def _catch_up(
    part: Drafter, params: Any, state: PartState, context: Context, wanted: Bool[Array, ""]
) -> tuple[PartState, Int[Array, ""]]:
    """The state with all observed if the drafter is wanted, else as much as could be lost soon.

    And the number of wide passes that this took.
    """
    wide, narrow = _widths(part)
    needed = wanted
    if part.features:
        needed |= _room(state, context) < context.longest_commit

    def observed(state: PartState, width: int) -> PartState:
        first = context.length - 1 - state.unobserved
        count = jnp.minimum(state.unobserved, width)
        accepted = Accepted(
            context.tokens_from(first + 1, width),
            count,
            {name: context.feature_from(name, first, width) for name in part.features},
        )
        after = context.replace(length=first + 1 + count)
        inner = part.observe(params, state.drafter, after, accepted)
        return PartState(inner, constrain(state.unobserved - count, "batch"))

    # What a drafter missed while it slept is read in few wide passes; a round's tokens in one.
    passes = needed * _wide_passes(part, state)
    for width, left in ((wide, narrow), (narrow, 0)):
        state = lax.while_loop(
            lambda state, left=left: needed & jnp.any(state.unobserved > left),
            functools.partial(observed, width=width),
            state,
        )
    return state, passes


def joined(first: Draft, second: Draft, length: int) -> Draft:
    """A draft of `length` nodes: each row's from the first draft that proposes any."""
    distributions = [draft.logq for draft in (first, second) if draft.logq is not None]
    offset = 0 if first.logq is None else first.logq.shape[1]
    second = second.replace(logq_row=jnp.where(second.logq_row < 0, -1, second.logq_row + offset))
    here = first.valid.any(axis=1, keepdims=True)
    first, second = with_confidences((first, second))
    known = first.confidence is not None

    def chosen(parts: Sequence[Array | np.ndarray], filler: float | bool) -> Array:
        room = [((0, 0), (0, length - part.shape[1])) for part in parts]
        padded = map(functools.partial(jnp.pad, constant_values=filler), parts, room)
        return jnp.where(here, *padded)

    def either(name: str, filler: float | bool) -> Array:
        return chosen([getattr(draft, name) for draft in (first, second)], filler)

    shapes = [draft.topology for draft in (first, second)]
    if all(shape.is_chain for shape in shapes):
        topology = chain_topology(length)
    else:
        parents = chosen([shape.row_parents for shape in shapes], 0)
        topology = DynamicTopology(parents, max(shape.depth for shape in shapes))
    return Draft(
        tokens=either("tokens", 0),
        valid=either("valid", False),
        logq_row=either("logq_row", -1),
        logq=jnp.concatenate(distributions, axis=1) if distributions else None,
        topology=topology,
        confidence=either("confidence", UNKNOWN) if known else None,
    )


def with_confidences(drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts; where any has confidences, those that have none get `UNKNOWN`."""
    if all(draft.confidence is None for draft in drafts):
        return list(drafts)
    return [
        draft.replace(confidence=jnp.full(draft.valid.shape, UNKNOWN))
        if draft.confidence is None
        else draft
        for draft in drafts
    ]
