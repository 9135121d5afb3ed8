"""Drafters that take turns; a drafter that may not draft does not run.

In each row the first drafter with a draft is used. A drafter runs only in rounds in which some row
may draft with it. Tokens committed meanwhile are observed before it proposes again, or earlier,
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
from jaxtyping import Array, Bool, Int, UInt32

from specjax.core.drafter import (
    Accepted,
    Context,
    Drafter,
    LoadedDrafter,
    Noise,
    StepLimits,
    TargetPass,
)
from specjax.core.none import empty_draft
from specjax.distributed.sharding import constrain
from specjax.errors import InputError
from specjax.trees import Draft, DynamicTopology, chain_topology
from specjax.trees.draft import check_draft, usable

NO_DRAFTER = -1
"""The value of `Proposal.drafter` in a row without a draft."""
_KEPT_ROUNDS = 8
"""The number of rounds, with full drafts, whose features are kept for drafters that do not run."""


@struct.dataclass
class PartState:
    """The state of one of several drafters.

    `drafter` is the state that its methods return, and `unobserved` how many of each row's latest
    tokens it has not observed yet.
    """

    drafter: Any
    unobserved: Int[Array, "B"]


class Proposal(NamedTuple):
    """The drafts of one round by drafters that take turns, and counts of the drafters' runs.

    `drafter` is the index of the drafter that each row's draft is from, or `NO_DRAFTER`. `ran` says
    which drafters ran, and `further` how many times each ran after its first token.
    """

    draft: Draft
    state: tuple[PartState, ...]
    drafter: Int[Array, "B"]
    ran: Bool[Array, "drafters"]
    further: Int[Array, "drafters"]


@dataclass(frozen=True)
class Turns:
    """Drafters in order of priority: in each row the first one that has a draft drafts.

    Parameters and states are tuples like `parts`. The result is exact if each drafter is: whether a
    drafter drafts depends on tokens that it does not draw, on distributions and on its own noise,
    which are independent of the draws of the next drafter. Raises InputError, while tracing, for
    drafts and states that a drafter must not return.
    """

    parts: tuple[Drafter, ...]

    @property
    def name(self) -> str:
        """The names of the drafters, joined by +."""
        return "+".join(drafter.name for drafter in self.parts)

    @property
    def num_speculative_tokens(self) -> int:
        """The longest path that any drafter drafts (P)."""
        return max(drafter.num_speculative_tokens for drafter in self.parts)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of every draft (N)."""
        return max(drafter.num_nodes for drafter in self.parts)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that any drafter reads."""
        drafting = [drafter for drafter in self.parts if drafter.num_speculative_tokens]
        return tuple(dict.fromkeys(name for drafter in drafting for name in drafter.features))

    @property
    def prompt_features(self) -> tuple[str, ...]:
        """The names of the target's features that any drafter observes of a prompt."""
        observing = [part for part in self.parts if part.num_speculative_tokens and part.observes]
        return tuple(dict.fromkeys(name for drafter in observing for name in drafter.features))

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The names of the features that any drafter reads after each pass of the target."""
        drafting = [drafter for drafter in self.parts if drafter.num_speculative_tokens]
        return tuple(dict.fromkeys(name for drafter in drafting for name in drafter.pass_features))

    @property
    def sampled(self) -> bool:
        """Whether any drafter draws its tokens from distributions."""
        return any(drafter.sampled for drafter in self.parts)

    @property
    def following_tokens(self) -> int | None:
        """The largest number of any drafter, or None if that of a drafter is None."""
        return most_following(self.parts)

    @property
    def kept_features(self) -> int:
        """The number of positions whose features drafters read after the rounds of a step."""
        longest = max(drafter.num_speculative_tokens for drafter in self.parts)
        return _KEPT_ROUNDS * (longest + 1)

    def limited(self, length: int) -> Turns:
        """Return the drafters with drafts of at most `length` tokens.

        The length of a single drafter is set to `length`, even if its own is shorter.
        """
        if len(self.parts) == 1:
            return Turns((replace(self.parts[0], num_speculative_tokens=length),))
        return Turns(
            tuple(
                replace(drafter, num_speculative_tokens=min(drafter.num_speculative_tokens, length))
                for drafter in self.parts
            )
        )

    def text_digests(self, params: tuple) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the digests of the texts of all drafters."""
        each = zip(self.parts, params, strict=True)
        return sum((drafter.text_digests(own_params) for drafter, own_params in each), ())

    def init(self, params: tuple, batch: int, capacity: int) -> tuple[PartState, ...]:
        """Return the drafters' states for empty rows."""
        return tuple(
            PartState(
                drafter.init(drafter_params, batch, capacity),
                constrain(jnp.zeros(batch, jnp.int32), "batch"),
            )
            for drafter, drafter_params in zip(self.parts, params, strict=True)
        )

    def observe_prompt(
        self, params: tuple, state: tuple[PartState, ...], context: Context, accepted: Accepted
    ) -> tuple[PartState, ...]:
        """Return the drafters' states after a chunk of the prompts, given in `accepted`."""
        return tuple(
            drafter_state.replace(
                drafter=observed(drafter, drafter_params, drafter_state.drafter, context, accepted)
            )
            if drafter.num_speculative_tokens
            else drafter_state
            for drafter, drafter_params, drafter_state in zip(
                self.parts, params, state, strict=True
            )
        )

    def observe_pass(
        self, params: tuple, state: tuple[PartState, ...], target_pass: TargetPass
    ) -> tuple[PartState, ...]:
        """Return the drafters' states after a pass of the target."""
        return tuple(
            drafter_state.replace(
                drafter=observed_pass(drafter, drafter_params, drafter_state.drafter, target_pass)
            )
            if drafter.num_speculative_tokens and drafter.pass_features
            else drafter_state
            for drafter, drafter_params, drafter_state in zip(
                self.parts, params, state, strict=True
            )
        )

    def commit(self, state: tuple[PartState, ...], count: Int[Array, "B"]) -> tuple[PartState, ...]:
        """Return the states after a round that committed `count` tokens in each row.

        The drafters have not observed these tokens yet.
        """
        return tuple(
            drafter_state.replace(unobserved=constrain(drafter_state.unobserved + count, "batch"))
            if drafter.observes and drafter.num_speculative_tokens
            else drafter_state
            for drafter, drafter_state in zip(self.parts, state, strict=True)
        )

    def full_limits(self) -> StepLimits:
        """Return limits that let each drafter draft as much as it can."""
        longest = np.array([drafter.num_nodes for drafter in self.parts], np.int32)
        return StepLimits(longest, np.zeros(len(self.parts), np.float32))

    def propose(
        self,
        params: tuple,
        state: tuple[PartState, ...],
        context: Context,
        noise: Noise,
        limits: StepLimits,
    ) -> Proposal:
        """Return each row's draft, from the first drafter that has one, and the states.

        Each drafter draws with its part of `noise`. `limits` are how much each may draft.
        """
        limits = jax.tree.map(jnp.asarray, limits)
        for name in ("longest", "confidence"):
            if (shape := getattr(limits, name).shape) != (len(self.parts),):
                raise InputError(
                    f"limits.{name} has shape {shape} for {len(self.parts)} drafters: use one "
                    "number per drafter"
                )
        drafted_by = jnp.full(context.length.shape, NO_DRAFTER, jnp.int32)
        joint_draft, states, ran, further = None, [], [], []
        for number, drafter in enumerate(self.parts):
            waiting = drafted_by == NO_DRAFTER
            own_context = _own_context(drafter, context, waiting, limits, number)
            draft, after = _take_turn(
                drafter,
                params[number],
                state[number],
                own_context,
                noise.part(number, branches=drafter.branches),
            )
            kept = jnp.arange(drafter.num_nodes)[None, :] < limits.longest[number]
            draft = draft.replace(valid=draft.topology.close(draft.valid & kept))
            drafted_by = jnp.where(draft.valid.any(axis=1) & waiting, number, drafted_by)
            states.append(after)
            ran.append(jnp.any(own_context.limit > 0))
            further.append(_further_passes(drafter, draft))
            if joint_draft is not None:
                draft = joined(joint_draft, draft, self.num_nodes)
            joint_draft = draft
        return Proposal(joint_draft, tuple(states), drafted_by, jnp.stack(ran), jnp.stack(further))


def take_turns(*drafters: LoadedDrafter | Drafter) -> LoadedDrafter:
    """Return a drafter that uses, in each row and round, the first of `drafters` with a draft."""
    parts, params = flattened(drafters, Turns)
    return LoadedDrafter(Turns(parts), params)


def most_following(drafters: Sequence[Drafter]) -> int | None:
    """Return the largest `following_tokens` of some drafters, or None if one of them is None."""
    each = [drafter.following_tokens for drafter in drafters if drafter.num_speculative_tokens]
    return None if None in each else max(each, default=0)


def flattened(
    drafters: Sequence[LoadedDrafter | Drafter], joint: type
) -> tuple[tuple[Drafter | Turns, ...], tuple]:
    """Return drafters and their parameters, with joined drafters replaced by their parts.

    `joint` is the class of joined drafters to replace, `Turns` or `Merged`.
    """
    parts: tuple[Drafter | Turns, ...] = ()
    params: tuple = ()
    for drafter in drafters:
        loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
        is_joint = isinstance(loaded.drafter, joint)
        parts += loaded.drafter.parts if is_joint else (loaded.drafter,)
        params += tuple(loaded.params) if is_joint else (loaded.params,)
    return parts, params


def _own_context(
    drafter: Drafter, context: Context, waiting: Bool[Array, "B"], limits: StepLimits, number: int
) -> Context:
    """Return the context of drafter `number`, which may draft only in the rows `waiting`."""
    longest = limits.longest[number]
    if drafter.branches:  # a limit is a number of nodes, and does not shorten the paths
        longest = jnp.where(longest > 0, drafter.num_speculative_tokens, 0)
    limit = jnp.minimum(drafter.longest_paths(context), longest)
    return context.replace(
        limit=jnp.where(waiting, limit, 0), least_confidence=limits.confidence[number]
    )


def _take_turn(
    drafter: Drafter, params: Any, state: PartState, context: Context, noise: Noise
) -> tuple[Draft, PartState]:
    """Return a drafter's draft and state.

    The drafter is not run if no row may draft, unless the context has `full_drafts`. Raises
    InputError as `check_proposal` does.
    """
    if not drafter.num_speculative_tokens:
        return empty_draft(context.length.shape[0], 0), state
    wanted = jnp.any(context.limit > 0)
    if drafter.observes and context.full_drafts:
        state = _observe(drafter, params, state, context, context.longest_commit)
    elif drafter.observes:
        state = _observe_all(drafter, params, state, context, wanted)

    def propose(state: PartState) -> tuple[Draft, PartState]:
        proposal = drafter.propose(params, state.drafter, context, noise)
        draft, inner = check_proposal(drafter, proposal, state.drafter, context)
        return usable(draft), state.replace(drafter=inner)

    propose = jax.jit(propose, inline=True)  # traced once for both uses
    shapes, _ = jax.eval_shape(propose, state)

    def sleep(state: PartState) -> tuple[Draft, PartState]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), state

    return propose(state) if context.full_drafts else lax.cond(wanted, propose, sleep, state)


def _further_passes(drafter: Drafter, draft: Draft) -> Int[Array, ""]:
    """Return how many times a drafter ran after its first token; a tree counts as one run."""
    if drafter.branches:
        return jnp.int32(0)
    if draft.steps is not None:
        return draft.steps
    return jnp.maximum(draft.valid.sum(axis=1).max() - 1, 0)


def _observe_all(
    drafter: Drafter, params: Any, state: PartState, context: Context, wanted: Bool[Array, ""]
) -> PartState:
    """Return the state after passes over all unobserved tokens, if the drafter is `wanted`.

    The passes are wide until at most a round's tokens are left, and these are read by a narrow one.
    A drafter that is not wanted makes the wide passes only, if it would lose features otherwise.
    """
    narrow = drafter.num_speculative_tokens + 1
    keeps = wanted
    if drafter.features:
        keeps |= _would_lose_features(state, context)

    def observe_until(left: int, width: int, needed: Bool[Array, ""], state: PartState) -> Any:
        # XLA updates a cache in place in a loop, but copies one that a branch returns.
        return lax.while_loop(
            lambda state: needed & jnp.any(state.unobserved > left),
            lambda state: _observe(drafter, params, state, context, width),
            state,
        )

    state = observe_until(narrow, _KEPT_ROUNDS * narrow, keeps, state)
    return observe_until(0, narrow, wanted, state)


def _would_lose_features(state: PartState, context: Context) -> Bool[Array, ""]:
    """Return whether the next round might overwrite features that were not observed."""
    kept = next(iter(context.features.values())).shape[1]
    return kept - state.unobserved.max() < context.longest_commit


def _observe(
    drafter: Drafter, params: Any, state: PartState, context: Context, width: int
) -> PartState:
    """Return the state after one pass over the oldest `width` unobserved tokens."""
    first = context.length - 1 - state.unobserved
    count = jnp.minimum(state.unobserved, width)
    accepted = Accepted(
        context.tokens_from(first + 1, width),
        count,
        {name: context.feature_from(name, first, width) for name in drafter.features},
    )
    after = context.replace(length=first + 1 + count)
    inner = observed(drafter, params, state.drafter, after, accepted)
    return PartState(inner, constrain(state.unobserved - count, "batch"))


def check_proposal(
    drafter: Drafter, proposal: Any, before: Any, context: Context
) -> tuple[Draft, Any]:
    """Return the draft and the state that `propose` returned, checked while tracing.

    `before` is the state and `context` the context that were passed. Raises InputError unless
    `proposal` is a draft of the declared size and a state, with the expected types and shapes.
    """
    name = f"drafter {drafter.name!r}: propose returned"
    is_pair = isinstance(proposal, tuple) and len(proposal) == 2
    if not is_pair or not isinstance(proposal[0], Draft):
        kind = type(proposal).__name__
        if isinstance(proposal, tuple):
            kind = f"({', '.join(type(entry).__name__ for entry in proposal)})"
        cure = "return (Draft, state), even if the state has not changed"
        if is_pair:
            cure = "return (Draft, state); trees.chain(tokens, count) makes a Draft of tokens"
        raise InputError(f"{name} {kind}; {cure}")
    draft, state = proposal
    rows, vocab_size = context.length.shape[0], context.target.vocab_size
    check_draft(draft, name, rows=rows, vocab_size=vocab_size)
    if draft.logq is not None and not drafter.sampled:
        raise InputError(
            f"{name} logq, so that its tokens are drawn, but its `sampled` is False; override the "
            "property to return True, or return logq=None for tokens that are chosen"
        )
    count = draft.topology.num_nodes
    if count != drafter.num_nodes:
        raise InputError(
            f"drafter {drafter.name!r}: its tokens are [B, {count}], and its num_nodes is "
            f"{drafter.num_nodes} with num_speculative_tokens={drafter.num_speculative_tokens} "
            f"(check_drafter's default is 2); always propose {drafter.num_nodes}, and mark unused "
            "ones invalid"
        )
    check_state(drafter, "propose", state, before)
    return draft, state


def check_state(drafter: Drafter, function: str, state: Any, before: Any) -> None:
    """Raise InputError, while tracing, if `state` differs from `before` in structure or shapes.

    `function` is the name of the method that returned it.
    """
    returned, wanted = (
        jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)
        for tree in (state, before)
    )
    if returned != wanted:
        raise InputError(
            f"drafter {drafter.name!r}: {function} returned the state {_in_words(state)} where "
            f"init made {_in_words(before)}; return one of the same arrays, shapes and dtypes"
        )


def _in_words(state: Any) -> str:
    """Return the dtypes and shapes of a state's arrays as text."""
    leaves = jax.tree.leaves(state)
    if not leaves:
        return f"{state!r:.80}"
    arrays = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in leaves[:6]]
    kind = "" if hasattr(state, "dtype") else type(state).__name__
    return f"{kind}({', '.join(arrays)}{', ...' if len(leaves) > 6 else ''})"


def observed(
    drafter: Drafter, params: Any, state: Any, context: Context, accepted: Accepted
) -> Any:
    """Return the state that a drafter's `observe` returned, checked by `check_state`."""
    after = drafter.observe(params, state, context, accepted)
    check_state(drafter, "observe", after, state)
    return after


def observed_pass(drafter: Drafter, params: Any, state: Any, target_pass: TargetPass) -> Any:
    """Return the state that a drafter's `observe_pass` returned, checked by `check_state`."""
    after = drafter.observe_pass(params, state, target_pass)
    check_state(drafter, "observe_pass", after, state)
    return after


def joined(first: Draft, second: Draft, length: int) -> Draft:
    """Return a draft of `length` nodes that has in each row the first of two drafts with nodes."""
    distributions = [draft.logq for draft in (first, second) if draft.logq is not None]
    offset = 0 if first.logq is None else first.logq.shape[1]
    second = second.replace(logq_row=jnp.where(second.logq_row < 0, -1, second.logq_row + offset))
    merged = first.drafted_by is not None or second.drafted_by is not None
    first, second = (
        draft.replace(drafted_by=jnp.zeros_like(draft.tokens))
        if merged and draft.drafted_by is None
        else draft
        for draft in (first, second)
    )
    from_first = first.valid.any(axis=1, keepdims=True)

    def chosen(arrays: Sequence[Array | np.ndarray], filler: float | bool) -> Array:
        padding = [((0, 0), (0, length - array.shape[1])) for array in arrays]
        padded = map(functools.partial(jnp.pad, constant_values=filler), arrays, padding)
        return jnp.where(from_first, *padded)

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
        drafted_by=either("drafted_by", 0) if merged else None,
    )
