"""Drafters that take turns, and that sleep while they do not draft.

In each row the first drafter with a draft has the turn. A drafter runs only in rounds in which some
row may draft with it: what was committed meanwhile is observed before it proposes again, or when no
more of the target's features can be kept. A single drafter is a tuple of one.
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
from specjax.drafters.base import (
    Accepted,
    Context,
    Drafter,
    Limits,
    LoadedDrafter,
    Noise,
    TargetPass,
)
from specjax.drafters.none import empty_draft
from specjax.errors import InputError
from specjax.sampling import drafter_noise
from specjax.trees import Draft, DynamicTopology, chain_topology

NO_DRAFTER = -1
"""The number of the drafter of a row without a draft."""
_KEPT_ROUNDS = 8
"""Rounds of full drafts whose features are kept for drafters that sleep."""


@struct.dataclass
class PartState:
    """A drafter's own state, and how many of each row's latest tokens it has not observed."""

    drafter: Any
    unobserved: Int[Array, "B"]


class Proposal(NamedTuple):
    """What drafters in turn propose.

    `drafter` is the number of the one that drafted in each row, or `NO_DRAFTER`. `ran` says which
    drafters ran, and `further` how often each ran after its first token.
    """

    draft: Draft
    state: tuple[PartState, ...]
    drafter: Int[Array, "B"]
    ran: Bool[Array, "drafters"]
    further: Int[Array, "drafters"]


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
            before.replace(drafter=_observed(part, own, before.drafter, context, accepted))
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

    def full_limits(self) -> Limits:
        """Limits that let each drafter draft all that it can."""
        longest = np.array([part.num_nodes for part in self.parts], np.int32)
        return Limits(longest, np.zeros(len(self.parts), np.float32))

    def propose(
        self,
        params: tuple,
        state: tuple[PartState, ...],
        context: Context,
        noise: Noise,
        limits: Limits,
    ) -> Proposal:
        """Each row's draft from the first drafter that has one, and the states.

        `noise` is asked at a depth of its own for each drafter, so that none knows what another
        one draws from; where a rule reads no distributions, all share the target's own.
        """
        limits = jax.tree.map(jnp.asarray, limits)
        drafter = jnp.full(context.length.shape, NO_DRAFTER, jnp.int32)
        draft, states, ran, further = None, [], [], []
        shares = context.needs_logq
        for number, part in enumerate(self.parts):
            waiting = drafter == NO_DRAFTER
            own = _own_context(part, context, waiting, limits, number)
            own_noise = drafter_noise(noise, number, len(self.parts)) if shares else noise
            new, after = _take_turn(part, params[number], state[number], own, own_noise)
            kept = jnp.arange(part.num_nodes)[None, :] < limits.longest[number]
            new = new.replace(valid=new.topology.close(new.valid & kept))
            drafter = jnp.where(new.valid.any(axis=1) & waiting, number, drafter)
            states.append(after)
            ran.append(jnp.any(own.limit > 0))
            further.append(_further_passes(part, new))
            draft = new if draft is None else joined(draft, new, self.num_nodes)
        return Proposal(draft, tuple(states), drafter, jnp.stack(ran), jnp.stack(further))


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


def _own_context(
    part: Drafter, context: Context, waiting: Bool[Array, "B"], limits: Limits, number: int
) -> Context:
    """The context of drafter `number`, whose draft only rows take that are still `waiting`."""
    longest = limits.longest[number]
    if part.branches:  # its paths are as long as ever, if it runs
        longest = jnp.where(longest > 0, part.num_speculative_tokens, 0)
    limit = jnp.minimum(context.limit, jnp.minimum(longest, part.num_speculative_tokens))
    return context.replace(
        limit=jnp.where(waiting, limit, 0), least_confidence=limits.confidence[number]
    )


def _take_turn(
    part: Drafter, params: Any, state: PartState, context: Context, noise: Noise
) -> tuple[Draft, PartState]:
    """What a drafter proposes, and its state; where no row may draft it sleeps.

    Raises InputError for a draft of another size than the drafter says.
    """
    if not part.num_speculative_tokens:
        return empty_draft(context.length.shape[0], 0), state
    wanted = jnp.any(context.limit > 0)
    if part.observes:
        state = _observe_missed(part, params, state, context, wanted)
        # Apart from `propose`: where one branch writes a cache and reads it in a loop, XLA copies.
        state = lax.cond(
            wanted,
            lambda state: _observe(part, params, state, context, part.num_speculative_tokens + 1),
            lambda state: state,
            state,
        )

    def propose(state: PartState) -> tuple[Draft, PartState]:
        proposal = part.propose(params, state.drafter, context, noise)
        draft, inner = check_proposal(part, proposal, state.drafter)
        return draft, state.replace(drafter=inner)

    propose = jax.jit(propose, inline=True)  # traced once for both uses
    shapes, _ = jax.eval_shape(propose, state)
    check_size(part, shapes)

    def sleep(state: PartState) -> tuple[Draft, PartState]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), state

    return lax.cond(wanted, propose, sleep, state)


def _further_passes(part: Drafter, draft: Draft) -> Int[Array, ""]:
    """How often a drafter ran after its first token; a tree counts as one pass."""
    if part.branches:
        return jnp.int32(0)
    if draft.steps is not None:
        return draft.steps
    return jnp.maximum(draft.valid.sum(axis=1).max() - 1, 0)


def _observe_missed(
    part: Drafter, params: Any, state: PartState, context: Context, wanted: Bool[Array, ""]
) -> PartState:
    """The state after wide passes over what a drafter missed while it slept, but for one round's.

    They are made if the drafter is `wanted`, or would lose features otherwise.
    """
    narrow = part.num_speculative_tokens + 1
    needed = wanted
    if part.features:
        needed |= _would_lose_features(state, context)
    return lax.while_loop(
        lambda state: needed & jnp.any(state.unobserved > narrow),
        lambda state: _observe(part, params, state, context, _KEPT_ROUNDS * narrow),
        state,
    )


def _would_lose_features(state: PartState, context: Context) -> Bool[Array, ""]:
    """Whether a round might overwrite features that were not observed."""
    kept = next(iter(context.features.values())).shape[1]
    return kept - state.unobserved.max() < context.longest_commit


def _observe(
    part: Drafter, params: Any, state: PartState, context: Context, width: int
) -> PartState:
    """The state after one pass over the oldest `width` tokens that were not observed."""
    first = context.length - 1 - state.unobserved
    count = jnp.minimum(state.unobserved, width)
    accepted = Accepted(
        context.tokens_from(first + 1, width),
        count,
        {name: context.feature_from(name, first, width) for name in part.features},
    )
    after = context.replace(length=first + 1 + count)
    inner = part.observe(params, state.drafter, after, accepted)
    check_state(part, "observe", inner, state.drafter)
    return PartState(inner, constrain(state.unobserved - count, "batch"))


def check_proposal(part: Drafter, proposal: Any, before: Any) -> tuple[Draft, Any]:
    """What `propose` returned, while it is traced; `before` is the state that it was given.

    Raises InputError where that is no draft and state, or a draft of other types or shapes.
    """
    name = f"drafter {part.name!r}: propose returned"
    is_pair = isinstance(proposal, tuple) and len(proposal) == 2
    if not is_pair or not isinstance(proposal[0], Draft):
        kind = type(proposal).__name__
        if isinstance(proposal, tuple):
            kind = f"({', '.join(type(entry).__name__ for entry in proposal)})"
        raise InputError(
            f"{name} {kind}; return (Draft, state), the state also where it is as before"
        )
    draft, state = proposal
    for field, kind, wanted in (
        ("tokens", jnp.integer, "int32[B, N], by jnp.argmax or .astype(jnp.int32)"),
        ("valid", jnp.bool_, "bool[B, N]"),
    ):
        array = jnp.asarray(getattr(draft, field))
        if array.ndim != 2 or not jnp.issubdtype(array.dtype, kind):
            raise InputError(f"{name} {field} of {array.dtype}{list(array.shape)}; return {wanted}")
    if draft.logq is not None and not part.sampled:
        raise InputError(
            f"{name} logq, so that its tokens are drawn, but its `sampled` is False; override the "
            "property to return True, or return logq=None for tokens that are chosen"
        )
    check_state(part, "propose", state, before)
    return draft, state


def check_state(part: Drafter, function: str, state: Any, before: Any) -> None:
    """Raise InputError, while it is traced, for a state that is not like the one `before`."""
    given, wanted = (
        jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
        for tree in (state, before)
    )
    if given != wanted:
        raise InputError(
            f"drafter {part.name!r}: {function} returned the state {_in_words(state)} where init "
            f"made {_in_words(before)}; return one of the same arrays, shapes and dtypes"
        )


def _in_words(state: Any) -> str:
    """The arrays of a state: their dtypes and shapes."""
    leaves = jax.tree.leaves(state)
    if not leaves:
        return repr(state)
    arrays = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in leaves[:6]]
    return f"{type(state).__name__}({', '.join(arrays)}{', ...' if len(leaves) > 6 else ''})"


def _observed(part: Drafter, params: Any, state: Any, context: Context, accepted: Accepted) -> Any:
    """A drafter's state after a chunk of the prompts."""
    after = part.observe(params, state, context, accepted)
    check_state(part, "observe", after, state)
    return after


def check_size(part: Drafter, draft: Draft) -> None:
    """Raise InputError for a draft of another size than its drafter says, which sizes the pass."""
    count = draft.topology.num_nodes
    if count != part.num_nodes:
        raise InputError(
            f"drafter {part.name!r}: proposes a tree of {count} nodes where its num_nodes is "
            f"{part.num_nodes}; propose that many, those that are not there invalid"
        )


def joined(first: Draft, second: Draft, length: int) -> Draft:
    """A draft of `length` nodes: each row's from the first draft that proposes any."""
    distributions = [draft.logq for draft in (first, second) if draft.logq is not None]
    offset = 0 if first.logq is None else first.logq.shape[1]
    second = second.replace(logq_row=jnp.where(second.logq_row < 0, -1, second.logq_row + offset))
    here = first.valid.any(axis=1, keepdims=True)

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
    )
