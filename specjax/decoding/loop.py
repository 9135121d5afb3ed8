"""One speculative round, and the compiled loop over rounds.

Everything here is traced: arrays in, arrays out, no host. Plain decoding is the same loop with a
drafter that proposes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from specjax import sampling
from specjax.cache import commit, put
from specjax.decoding.draft_length import no_history, remember
from specjax.decoding.state import FULL, RUNNING, STOPPED, Plan, Rounds, Rows, State
from specjax.decoding.verify import VerifiedDraft, verify_draft
from specjax.distributed.sharding import constrain_rows
from specjax.drafters.base import Accepted, Context, Noise
from specjax.models.prefill import prefill
from specjax.trees import Draft, is_chain


def start(
    plan: Plan,
    params: Any,
    tokens: Int[Array, "B S"],
    rows: Rows,
    length: Int[Array, "B"],
    status: Int[Array, "B"],
) -> State:
    """The state before the first round: prompts prefilled but for their last token.

    `params` is (target's, drafter's).
    """
    batch = tokens.shape[0]
    target_params, draft_params = params
    cache, features = prefill(
        plan.target,
        target_params,
        tokens,
        length - 1,
        plan.target.make_cache(batch, plan.capacity),
        plan.chunk,
        plan.drafter.features,
    )
    empty = jnp.full((batch, plan.max_rounds), -1, jnp.int32)
    state = State(
        tokens=tokens,
        length=length,
        status=status,
        cache=cache,
        drafter=(),
        rows=rows,
        round=jnp.int32(0),
        rounds=Rounds(empty, empty, empty, empty),
        history=no_history(batch),
        logprobs=jnp.zeros(tokens.shape, jnp.float32) if plan.logprobs else None,
        overlaps=(
            jnp.full((batch, plan.max_rounds, plan.draft_length.max_tokens), jnp.nan)
            if plan.overlaps
            else None
        ),
    )
    rows_first = ("tokens", "length", "status", "rows", "rounds", "history", "logprobs", "overlaps")
    state = state.replace(**{name: constrain_rows(getattr(state, name)) for name in rows_first})
    context = _context(plan, target_params, state)
    return state.replace(drafter=plan.drafter.init(draft_params, context, features))


def run(plan: Plan, params: Any, state: State, max_rounds: Int[Array, ""]) -> State:
    """Rounds until every row is finished, at most `max_rounds` of them (traced)."""

    def going(carry: tuple[Array, State]) -> Array:
        done, state = carry
        return (done < max_rounds) & jnp.any(state.active)

    def step(carry: tuple[Array, State]) -> tuple[Array, State]:
        done, state = carry
        return done + 1, one_round(plan, params, state)

    return lax.while_loop(going, step, (jnp.int32(0), state))[1]


def one_round(plan: Plan, params: Any, state: State) -> State:
    """Propose, extend, verify, commit, observe: e tokens are committed in each unfinished row."""
    target_params, draft_params = params
    keys = _round_keys(plan, state)
    draft, drafter_state = propose(plan, params, state)
    drafted = draft.valid.sum(axis=1, dtype=jnp.int32)

    # The narrowest compiled width that holds every row's draft.
    branch = jnp.searchsorted(np.asarray(plan.widths), 1 + drafted.max())
    branches = [
        functools.partial(verify_draft, plan, target_params, state, draft, drafted, keys, width)
        for width in plan.widths
    ]
    verified = lax.switch(branch, branches)

    count, status = _truncate(state, verified)
    took_part = count > 0
    accepted_count = jnp.where(took_part, verified.verification.num_accepted, 0)
    column = {
        "width": jnp.broadcast_to(jnp.asarray(plan.widths, jnp.int32)[branch], count.shape),
        "drafted": drafted,
        "accepted": accepted_count,
        "emitted": count,
    }
    recorded = {
        name: getattr(state.rounds, name).at[:, state.round].set(jnp.where(took_part, new, -1))
        for name, new in column.items()
    }
    state = _commit(state, verified, count, status).replace(
        round=state.round + 1,
        rounds=Rounds(**recorded),
        history=remember(state.history, drafted, accepted_count),
        overlaps=(
            None
            if state.overlaps is None
            else state.overlaps.at[:, state.round].set(
                jnp.where(took_part[:, None], verified.overlaps, jnp.nan)
            )
        ),
    )
    accepted = Accepted(verified.verification.path_slots, verified.tokens, count, verified.features)
    context = _context(plan, target_params, state)
    return state.replace(
        drafter=plan.drafter.observe(draft_params, drafter_state, context, accepted)
    )


def propose(plan: Plan, params: Any, state: State) -> tuple[Draft, Any]:
    """The drafter's proposal for this round, within each row's limit, and its new state."""
    target_params, draft_params = params
    context = _context(plan, target_params, state)
    noise = _draft_noise(plan, state, _round_keys(plan, state))
    draft, drafter_state = plan.drafter.propose(draft_params, state.drafter, context, noise)
    if not is_chain(draft):
        raise ValueError(
            f"drafter {plan.drafter.name!r} proposes a tree: the rules here verify chains, "
            "so build drafts with trees.chain"
        )
    within = jnp.arange(draft.valid.shape[1])[None, :] < context.limit[:, None]
    return draft.replace(valid=draft.valid & within), drafter_state


def _truncate(state: State, verified: VerifiedDraft) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """How many tokens each row commits, and its status then.

    The path ends after the first stop token, and at the row's longest length.
    """
    step = jnp.arange(verified.tokens.shape[1])[None, :]
    count = verified.verification.num_accepted + 1
    stops = (verified.tokens[:, :, None] == state.rows.stop_ids[:, None, :]).any(axis=2)
    stops &= step < count[:, None]
    count = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, count)
    count = jnp.minimum(count, state.rows.max_length - state.length)
    stopped = (stops & (step < count[:, None])).any(axis=1)
    full = state.length + count >= state.rows.max_length
    status = jnp.where(stopped, STOPPED, jnp.where(full, FULL, RUNNING))
    return (
        jnp.where(state.active, count, 0).astype(jnp.int32),
        jnp.where(state.active, status, state.status),
    )


def _commit(
    state: State, verified: VerifiedDraft, count: Int[Array, "B"], status: Int[Array, "B"]
) -> State:
    """Append the root's and the path's keys to the cache, and the new tokens to the row."""
    step = jnp.arange(verified.tokens.shape[1])[None, :]
    where = jnp.where(step < count[:, None], state.length[:, None] + step, state.tokens.shape[1])
    slots = jnp.pad(jnp.maximum(verified.verification.path_slots, 0), ((0, 0), (1, 0)))
    logprobs = state.logprobs
    if logprobs is not None:
        logprobs = put(logprobs, where, verified.logprobs)
    return state.replace(
        tokens=put(state.tokens, where, verified.tokens),
        length=state.length + count,
        status=status,
        cache=commit(state.cache, verified.window, slots, count),
        logprobs=logprobs,
    )


def _context(plan: Plan, params: Any, state: State) -> Context:
    # A draft longer than what the row may still emit, less the target's own token, is waste.
    room = state.rows.max_length - state.length - 1
    limit = jnp.minimum(plan.draft_length.limit(state.history, state.active), room)
    return Context(
        tokens=state.tokens,
        length=state.length,
        limit=jnp.maximum(limit, 0),
        index=state.rows.index,
        sampling=state.rows.sampling,
        cache=state.cache,
        params=params,
        target=plan.target,
        flags=plan.flags,
        num_tokens=plan.draft_length.max_tokens,
        needs_logq=plan.flags.sampled and plan.rule != sampling.COUPLED,
    )


def _round_keys(plan: Plan, state: State) -> Key[Array, "B"]:
    """Each row's key for this round's draws; `coupled` keeps one key for the whole row."""
    if plan.rule == sampling.COUPLED:
        return state.rows.key
    return sampling.fold_round(state.rows.key, state.round)


def _draft_noise(plan: Plan, state: State, keys: Key[Array, "B"]) -> Noise:
    vocab = plan.target.vocab_size
    if plan.rule == sampling.COUPLED:
        return sampling.coupled_noise(keys, state.length, vocab)
    return sampling.draft_noise(keys, vocab)
