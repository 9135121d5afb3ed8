"""One speculative round, and the compiled loop over rounds.

Everything here is traced: arrays in, arrays out, no host. Plain decoding is the same loop with a
drafter that proposes nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import sampling
from specjax.cache import KVCache, commit, put
from specjax.decoding.plan import Plan
from specjax.decoding.state import (
    FAILED,
    FULL,
    RUNNING,
    STOPPED,
    Rounds,
    Rows,
    Seen,
    State,
    release,
)
from specjax.decoding.verify import VerifiedDraft, verify_draft, verify_some_rows
from specjax.distributed.sharding import constrain_rows
from specjax.draft_length import survival
from specjax.draft_length.policy import (
    NOT_FORCED,
    Costs,
    Decisions,
    Policy,
    new_policy,
    row_weights,
)
from specjax.drafters.base import Accepted, Context, Noise, ReplayedRound, TargetPass
from specjax.drafters.turns import NO_DRAFTER, Intention, Proposal
from specjax.models.prefill import prefill
from specjax.trees import Draft

_ROWS_FIRST = (
    "tokens",
    "length",
    "status",
    "undrafted",
    "features",
    "rows",
    "round",
    "history",
    "logprobs",
)
"""The parts of a state that are spread over devices by their first axis."""


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
    return read_prompts(plan, params, empty_state(plan, params, tokens, rows, length, status))


def read_prompts(
    plan: Plan,
    params: Any,
    state: State,
    begin: Int[Array, ""] | int = 0,
    end: Int[Array, ""] | int | None = None,
) -> State:
    """The state after target and drafter have read the prompts' positions from `begin` to `end`.

    Those before `begin` were read earlier. `end` is rounded up to whole chunks of the smallest
    size; without it, the prompts are read but for their last token.
    """
    target_params, draft_params = params
    drafter, length = plan.drafter, state.length

    def observe(
        carry: Any,
        cache: KVCache,
        first: Int[Array, ""],
        count: Int[Array, "B"],
        features: dict[str, Array],
        size: int,
    ) -> Any:
        # What has been read of each row, and the token after it.
        known = jnp.clip(length - 1, 0, first + count) + 1
        context = make_context(plan, target_params, state.replace(length=known, cache=cache))
        following = context.tokens_from(jnp.broadcast_to(first + 1, count.shape), size)
        if drafter.pass_features:
            chunk = context.tokens_from(jnp.broadcast_to(first, count.shape), size)
            read = jnp.arange(size)[None, :] < count[:, None]
            carry = drafter.observe_pass(
                draft_params,
                carry,
                TargetPass(chunk, read, _named(features, drafter.pass_features)),
            )
        accepted = Accepted(following, count, _named(features, drafter.features))
        return drafter.observe_prompt(draft_params, carry, context, accepted)

    cache, drafter_state = prefill(
        plan.target,
        target_params,
        state.tokens,
        length - 1,
        state.cache,
        plan.chunks,
        (*drafter.features, *drafter.pass_features),
        observe,
        state.drafter,
        begin,
        end,
    )
    return state.replace(cache=cache, drafter=drafter_state)


def _named(features: dict[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
    """Those of the features that have these names."""
    return {name: features[name] for name in names}


def empty_state(
    plan: Plan,
    params: Any,
    tokens: Int[Array, "B S"],
    rows: Rows,
    length: Int[Array, "B"],
    status: Int[Array, "B"],
) -> State:
    """The state of rows whose tokens neither the target nor the drafter has read."""
    batch = tokens.shape[0]
    target_params, draft_params = params
    target, drafter = plan.target, plan.drafter
    kept = drafter.kept_features
    shapes = _feature_shapes(plan, target_params, tokens)
    state = State(
        tokens=tokens,
        length=length,
        status=status,
        undrafted=jnp.zeros(batch, bool),
        cache=target.make_cache(batch, plan.capacity),
        drafter=drafter.init(draft_params, batch, plan.capacity),
        features={
            name: jnp.zeros((batch, kept, shape.shape[2]), shape.dtype)
            for name, shape in shapes.items()
        },
        rows=rows,
        round=jnp.zeros(batch, jnp.int32),
        history=(
            survival.no_history(batch, len(drafter.parts)) if plan.draft_length.auto else None
        ),
        policy=(
            new_policy(
                len(drafter.parts),
                plan.draft_length.max_tokens,
                drafter.num_nodes,
                len(plan.widths),
            )
            if plan.draft_length.auto
            else None
        ),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
    )
    return state.replace(**{name: constrain_rows(getattr(state, name)) for name in _ROWS_FIRST})


def _feature_shapes(
    plan: Plan, params: Any, tokens: Int[Array, "B S"]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the features that the drafters read, of one token per row."""
    if not plan.drafter.features:
        return {}
    batch = tokens.shape[0]

    def extend(params: Any) -> dict[str, Array]:
        return plan.target.extend(
            params,
            tokens[:, :1],
            jnp.zeros((batch, 1), jnp.int32),
            plan.target.make_cache(batch, plan.capacity),
            plan.target.make_window(batch, 1),
            0,
            jnp.ones((1, 1, 1), bool),
            features=plan.drafter.features,
            logits=False,
        ).features

    return jax.eval_shape(extend, params)


def step(
    plan: Plan,
    params: Any,
    state: State,
    ended: Bool[Array, "B"],
    max_rounds: Int[Array, ""],
    enough: Int[Array, ""],
    whole: Bool[Array, ""] | bool = False,
) -> tuple[State, Seen]:
    """A few rounds, as `run`, of rows that the host may have `ended`, and what it sees of them.

    Rows that had finished before are released: their caches cost no more reading.
    """
    status = jnp.where(ended & state.active, STOPPED, state.status)
    finished = status != RUNNING
    slots = jnp.where(finished, jnp.arange(len(status)), len(status))
    # A failed row stays one, whatever it holds.
    state = release(state, slots).replace(status=status)
    first = state.length
    state, rounds = run(plan, params, state, max_rounds, enough, whole)
    most = plan.rounds_per_step * (plan.drafter.num_speculative_tokens + 1)
    new = first[:, None] + jnp.arange(min(most, plan.capacity))[None, :]
    new = jnp.minimum(new, plan.capacity - 1)
    seen = Seen(
        status=state.status,
        tokens=jnp.take_along_axis(state.tokens, new, axis=1),
        logprobs=jnp.take_along_axis(state.logprobs, new, axis=1) if plan.logprobs else None,
        rounds=rounds,
    )
    return state, seen


def plain_step(
    plan: Plan,
    params: Any,
    state: State,
    ended: Bool[Array, "B"],
    max_rounds: Int[Array, ""],
    enough: Int[Array, ""],
) -> tuple[State, Seen]:
    """`step` under "auto" while all drafters sleep: what is run is plain decoding's program.

    It ends before a drafter has to observe. `look_ahead` takes what happened into the policy.
    """
    context = make_context(plan, params[0], state)
    max_rounds = jnp.minimum(max_rounds, plan.drafter.room(state.drafter, context))
    bare = state.replace(policy=None, history=None)
    whole = state.policy.measures
    after, seen = step(plan.without_drafts, params, bare, ended, max_rounds, enough, whole)
    return after.replace(policy=state.policy, history=state.history), seen


def look_ahead(
    plan: Plan, params: Any, state: State, emitted: Int[Array, "B R"], enough: Int[Array, ""]
) -> tuple[Policy, Intention]:
    """The policy after plain rounds, and what the drafters would do in the next round.

    `emitted` are the tokens of rounds that the policy does not know of, -1 where there are none.
    """
    target_params, draft_params = params
    nothing = jnp.zeros(len(plan.drafter.parts), jnp.int32)

    def learn(index: Int[Array, ""], policy: Policy) -> Policy:
        count = emitted[:, index]
        weight = (count >= 0).astype(jnp.float32)
        ran = nothing > 0, nothing, nothing, nothing
        partial = plan.is_partial((count >= 0).sum()) & ~policy.measures
        count, costs = jnp.maximum(count, 0), _costs(plan, state, partial)
        return policy.after_round(
            weight, count, jnp.int32(0), *ran, policy.survival, costs, partial
        )

    policy = state.policy.replace(all_rows=jnp.asarray(enough > len(state.length)))
    plain_rounds = (emitted >= 0).any(axis=0).sum()
    policy = lax.fori_loop(0, plain_rounds, learn, policy)
    state = state.replace(policy=policy)
    context = make_context(plan, target_params, state)
    noise = draft_noise(plan, state, round_keys(plan, state))
    intention = plan.drafter.intend(draft_params, state.drafter, context, noise)
    in_vain = intention.ran & ~intention.found
    # Who is run again in the next round is counted there.
    sleeps = ~intention.drafts & (intention.room > 0) & (policy.forced == NOT_FORCED).all()
    declined = (sleeps & in_vain) * state.active.sum()
    policy = policy.replace(
        # What has found a draft is still due, if that is why it was run.
        idle_rounds=jnp.where(in_vain & ~policy.free, 0, policy.idle_rounds),
        work=policy.work.replace(first=policy.work.first + intention.ran),
        # A lookup would have been run in each of these rounds.
        survival=survival.decline(policy.survival, declined, jnp.maximum(plain_rounds, 1)),
    )
    return policy, intention


def run(
    plan: Plan,
    params: Any,
    state: State,
    max_rounds: Int[Array, ""],
    enough: Int[Array, ""] | None = None,
    whole: Bool[Array, ""] | bool = False,
) -> tuple[State, Rounds]:
    """Rounds until every row has finished, or `enough` rows have; at most `max_rounds` of them.

    Where `enough` is more than there are rows, no request waits for one that finishes: "auto" then
    drafts so that the last one does so soon.
    Both numbers are traced, and no more than `plan.rounds_per_step` rounds run. The counts have a
    column for each of those. `whole` rounds are over finished rows as well, to be timed; others
    may leave them out (`Plan.partial_rows`).
    """
    batch, columns = len(state.length), plan.rounds_per_step
    enough = batch + 1 if enough is None else enough
    most = jnp.minimum(max_rounds, columns)
    none = jnp.full((batch, columns), -1, jnp.int32)
    overlaps = None
    if plan.overlaps:
        overlaps = jnp.full((batch, columns, plan.drafter.num_speculative_tokens), jnp.nan)
    rounds = constrain_rows(Rounds(none, none, none, none, none, overlaps))
    if state.policy is not None:
        state = state.replace(policy=state.policy.replace(all_rows=jnp.asarray(enough > batch)))

    def going(carry: tuple[Array, State, Rounds]) -> Array:
        done, state, _ = carry
        finished = batch - state.active.sum()
        return (done < most) & (finished < jnp.minimum(enough, batch))

    def advance(carry: tuple[Array, State, Rounds]) -> tuple[Array, State, Rounds]:
        done, state, rounds = carry
        state, counts = one_round(plan, params, state, whole)
        rounds = jax.tree.map(
            lambda into, new: lax.dynamic_update_index_in_dim(into, new, done, 1), rounds, counts
        )
        return done + 1, state, rounds

    return lax.while_loop(going, advance, (jnp.int32(0), state, rounds))[1:]


def one_round(
    plan: Plan, params: Any, state: State, whole: Bool[Array, ""] | bool = False
) -> tuple[State, Rounds]:
    """Observe, propose, extend, verify, commit: e tokens are committed in each unfinished row.

    Returns the state after it, and the round's counts. `whole` as for `run`.
    """
    target_params, draft_params = params
    keys = round_keys(plan, state)
    proposal = propose(plan, params, state)
    draft = proposal.draft
    drafted = draft.valid.sum(axis=1, dtype=jnp.int32)

    # The narrowest compiled width that holds every row's draft, up to its last node.
    slots = jnp.arange(1, draft.topology.width)[None, :]
    last = jnp.where(draft.valid, slots, 0).max(initial=0)
    branch = jnp.searchsorted(np.asarray(plan.widths), 1 + last)
    if state.policy is not None:
        branch = jnp.maximum(branch, state.policy.narrowest)
        draft = _widened(state, draft)
        whole |= state.policy.measures
    arguments = plan, target_params, state, draft, keys
    branches = [functools.partial(verify_draft, *arguments, width) for width in plan.widths]
    partial = plan.is_partial(state.active.sum()) & ~jnp.asarray(whole)
    if plan.partial_rows is not None:
        rows = unfinished_first(state)[: plan.partial_rows]
        branches += [
            functools.partial(verify_some_rows, *arguments, width, rows) for width in plan.widths
        ]
    verified = lax.switch(branch + len(plan.widths) * partial, branches)

    count, status, undrafted = _truncate(state, verified, drafted)
    participated = count > 0
    accepted = jnp.where(participated, verified.verification.num_accepted, 0)
    column = {
        "width": jnp.broadcast_to(jnp.asarray(plan.widths, jnp.int32)[branch], count.shape),
        "drafted": drafted,
        "accepted": accepted,
        "emitted": count,
        "drafter": proposal.drafter,
    }
    rounds = Rounds(**{name: jnp.where(participated, new, -1) for name, new in column.items()})
    if plan.overlaps:
        overlaps = jnp.where(participated[:, None], verified.overlaps, jnp.nan)
        rounds = rounds.replace(overlaps=overlaps)
    learned = {}
    if state.policy is not None:
        path = jnp.where(participated[:, None], verified.verification.path_slots, -1)
        costs = _costs(plan, state, partial)
        learned = _learn(state, proposal, branch, path, count, costs, partial)
    drafter_state = proposal.state
    if verified.target_pass is not None:
        drafter_state = plan.drafter.observe_pass(draft_params, drafter_state, verified.target_pass)
    after = _commit(state, verified, count, status).replace(
        undrafted=undrafted,
        drafter=plan.drafter.commit(drafter_state, count),
        round=state.round + participated,
        **learned,
    )
    return after, rounds


def unfinished_first(state: State) -> Int[Array, "B"]:
    """The rows' numbers, those of unfinished rows before the others."""
    return jnp.argsort(~state.active, stable=True)


def _costs(plan: Plan, state: State, partial: Bool[Array, ""]) -> Costs:
    """What a round costs under "auto" whose pass is `partial`, or over all rows."""
    costs = state.policy.costs
    if plan.partial_rows is None:
        return costs
    few = costs.of_share(plan.widths, plan.partial_rows / len(state.length))
    return jax.tree.map(functools.partial(jnp.where, partial), few, costs)


def _learn(
    state: State,
    proposal: Proposal,
    width: Int[Array, ""],
    path: Int[Array, "B P"],
    count: Int[Array, "B"],
    costs: Costs,
    partial: Bool[Array, ""],
) -> dict[str, Any]:
    """The policy and the rows' histories after a round; `path` are the accepted slots.

    `costs` are those of rounds like it, and `partial` says whether its pass was.
    """
    policy, draft = state.policy, proposal.draft
    slots = jnp.arange(draft.topology.width)
    accepted = (path[:, :, None] == slots[None, None, :]).any(axis=1).at[:, 0].set(count > 0)
    parents = jnp.broadcast_to(draft.topology.row_parents, draft.tokens.shape)
    confidence = draft.confidence
    if confidence is None:
        confidence = jnp.full(draft.tokens.shape, survival.UNKNOWN)
    seen, history = survival.observe(
        policy.survival,
        state.history,
        proposal.drafter,
        confidence,
        draft.topology.row_depths[:, 1:] - 1,
        draft.valid,
        draft.valid & jnp.take_along_axis(accepted, parents, axis=1),
        accepted[:, 1:],
        proposal.first * (state.active & (proposal.drafter == NO_DRAFTER)).sum(),
    )
    drafted = (proposal.drafter[:, None] == jnp.arange(len(proposal.first))[None, :]).any(axis=0)
    ran = drafted, proposal.first, proposal.further, proposal.catch_up
    policy = policy.after_round(_row_weights(state), count, width, *ran, seen, costs, partial)
    return {"policy": policy, "history": history}


def propose(plan: Plan, params: Any, state: State) -> Proposal:
    """The drafters' proposal for this round, within each row's limit, and their new states.

    Raises ValueError for a tree under a rule that verifies chains.
    """
    target_params, draft_params = params
    context = make_context(plan, target_params, state)
    noise = draft_noise(plan, state, round_keys(plan, state))
    proposal = plan.drafter.propose(draft_params, state.drafter, context, noise)
    draft = proposal.draft
    if not (draft.topology.is_chain or plan.rule.takes_trees):
        raise ValueError(
            f"drafter {plan.drafter.name!r} proposes a tree: {plan.rule.name} verifies chains, so "
            "build drafts with trees.chain"
        )
    within = draft.topology.row_depths[:, 1:] <= context.limit[:, None]
    # A token that the target does not know has no embedding, and would spoil the whole row.
    within &= (draft.tokens >= 0) & (draft.tokens < plan.target.vocab_size)
    if draft.logq is not None and draft.logq.size:
        # Nothing is drawn from logits of which all are -inf, or one is NaN or inf.
        drawn = jnp.isfinite(jnp.max(draft.logq, axis=-1))
        drawn = jnp.take_along_axis(drawn, jnp.maximum(draft.logq_row, 0), axis=1)
        within &= drawn | (draft.logq_row < 0)
    valid = draft.topology.close(draft.valid & within)
    draft = draft.replace(valid=valid, tokens=jnp.where(valid, draft.tokens, 0))
    return proposal._replace(draft=draft)


def _widened(state: State, draft: Draft) -> Draft:
    """The draft with tokens of the row itself in the slots that only make a window wide.

    Where the cost of a width is measured, equal tokens there would be sent to the same experts, and
    a pass over them would seem cheaper than one over drafts.
    """
    length = jnp.maximum(state.length, 1)[:, None]
    back = jnp.arange(1, draft.topology.width)[None, :]
    own = jnp.take_along_axis(state.tokens, (length - 1 - back) % length, axis=1)
    fills = (state.policy.narrowest > 0) & ~draft.valid
    return draft.replace(tokens=jnp.where(fills, own, draft.tokens))


def _truncate(
    state: State, verified: VerifiedDraft, drafted: Int[Array, "B"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Bool[Array, "B"]]:
    """How many tokens each row commits, its status then, and whether it drafts no more.

    The path ends after the first stop token, at the row's longest length, and before the first
    token whose logits are not numbers. A draft may be what spoiled these, also where it is refused:
    in attention even a weight of 0 times NaN is NaN. So the row fails without a draft only.
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
    broken = ~verified.numbers & (step < count[:, None])
    failed = broken.any(axis=1)
    count = jnp.where(failed, jnp.argmax(broken, axis=1), count)
    status = jnp.where(failed, jnp.where(drafted > 0, RUNNING, FAILED), status)
    return (
        jnp.where(state.active, count, 0).astype(jnp.int32),
        jnp.where(state.active, status, state.status),
        state.undrafted | (failed & state.active),
    )


def _commit(
    state: State, verified: VerifiedDraft, count: Int[Array, "B"], status: Int[Array, "B"]
) -> State:
    """Append the root's and the path's keys to the cache, and the new tokens to the row."""
    step = jnp.arange(verified.tokens.shape[1])[None, :]
    where = jnp.where(step < count[:, None], state.length[:, None] + step, state.tokens.shape[1])
    slots = jnp.pad(jnp.maximum(verified.verification.path_slots, 0), ((0, 0), (1, 0)))
    logprobs = state.logprobs
    if verified.logprobs is not None:
        logprobs = put(logprobs, where, verified.logprobs)
    features = {}
    for name, kept in state.features.items():
        # The root's feature, and those of the path, at their positions modulo M.
        at = (state.length[:, None] - 1 + step) % kept.shape[1]
        at = jnp.where(step < count[:, None], at, kept.shape[1])
        features[name] = put(kept, at, verified.features[name])
    return state.replace(
        features=features,
        tokens=put(state.tokens, where, verified.tokens),
        length=state.length + count,
        status=status,
        cache=commit(state.cache, verified.window, slots, count),
        logprobs=logprobs,
    )


def make_context(plan: Plan, params: Any, state: State) -> Context:
    """What drafters may look at in a state; `params` are the target's."""
    # A draft longer than what the row may still emit, less the target's own token, is waste.
    room = state.rows.max_length - state.length - 1
    limit = jnp.minimum(plan.draft_length.limit(state.active), room)
    limit = jnp.where(state.undrafted, 0, limit)
    replay = decisions = None
    if plan.draft_length.replayed:
        before = state.rows.replay
        column = jnp.minimum(state.round, before.drafted.shape[1] - 1)[:, None]
        replay = ReplayedRound(
            jnp.take_along_axis(before.drafted, column, axis=1)[:, 0],
            jnp.take_along_axis(before.drafter, column, axis=1)[:, 0],
        )
    elif plan.draft_length.auto:
        policy = state.policy
        partial = plan.is_partial(state.active.sum()) & ~policy.measures
        policy = policy.replace(costs=_costs(plan, state, partial))
        decisions = Decisions(policy, state.history, state.active, _row_weights(state), plan.widths)
    return Context(
        tokens=state.tokens,
        length=state.length,
        limit=jnp.maximum(limit, 0),
        prompt_length=state.rows.prompt_length,
        index=state.rows.index,
        sampling=state.rows.sampling,
        cache=state.cache,
        params=params,
        features=state.features,
        target=plan.target,
        flags=plan.flags,
        needs_logq=plan.flags.sampled and plan.rule.needs_logq,
        longest_commit=plan.drafter.num_speculative_tokens + 1,
        decisions=decisions,
        replay=replay,
    )


def _row_weights(state: State) -> Float[Array, "B"]:
    """What a token of each row is worth to "auto"."""
    rows = state.rows
    late = row_weights(
        state.active, rows.max_length - state.length, state.length - rows.prompt_length, state.round
    )
    return jnp.where(state.policy.all_rows, late, state.active.astype(late.dtype))


def round_keys(plan: Plan, state: State) -> Key[Array, "B"]:
    """Each row's key for its own next round; with noise by position, the key of the whole row."""
    if plan.rule.position_noise:
        return state.rows.key
    return sampling.fold_round(state.rows.key, state.round)


def draft_noise(plan: Plan, state: State, keys: Key[Array, "B"]) -> Noise:
    """The noise that drafts of a round are drawn with; `keys` are `round_keys`."""
    vocab = plan.target.vocab_size
    if plan.rule.position_noise:
        return sampling.coupled_noise(keys, state.length, vocab)
    return sampling.draft_noise(keys, vocab)
