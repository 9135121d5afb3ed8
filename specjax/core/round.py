"""One speculative round: observe, propose, extend, verify, commit.

Everything in this module is traced. Plain decoding is the same round with a drafter that proposes
nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import sampling
from specjax.core.cache import commit, put
from specjax.core.drafter import Context, Noise, StepLimits
from specjax.core.in_place import apply_if
from specjax.core.plan import LoopPlan
from specjax.core.processor import advanced, allowed_nodes
from specjax.core.state import BARRED, FAILED, FULL, RUNNING, STOPPED, Rounds, State, Tally
from specjax.core.turn_taking import Proposal
from specjax.core.verify import VerifiedDraft, verify_draft
from specjax.trees import Draft

_STRIDE = 7919
"""The distance between the ids of tokens that are to differ: a prime, larger than many batches."""


def one_round(
    plan: LoopPlan, params: Any, state: State, limits: StepLimits | None = None
) -> tuple[State, Rounds, Tally]:
    """Run one round: observe, propose, extend, verify, and commit tokens in each unfinished row.

    `params` are the target's and the drafters' parameters. Returns the new state, the round's
    counts by row, and its counts by drafter. Without `limits` drafts have their full length.
    """
    limits = plan.drafter.full_limits() if limits is None else limits
    proposal = propose(plan, params, state, limits)
    draft = proposal.draft
    drafted = draft.valid.sum(axis=1, dtype=jnp.int32)

    # The narrowest compiled width that holds every row's draft, up to its last node.
    slots = jnp.arange(1, draft.topology.width)[None, :]
    last = jnp.where(draft.valid, slots, 0).max(initial=0)
    width = jnp.maximum(1 + last, limits.least_width)
    narrowest = (np.asarray(plan.widths) < width).sum(dtype=jnp.int32)
    keys = noise_keys(plan, params[1], state)
    proposed = state.replace(drafter=proposal.state)
    arguments = plan, params, draft, keys
    if len(plan.widths) == 1:
        after, end = _verify_and_commit(*arguments, plan.widths[0], proposed)
    else:
        # Each width appends its own slots, so that a pass without a draft appends one.
        after, end = proposed, _no_end(plan, draft)
        for number, width in enumerate(plan.widths):

            def run(before: tuple[State, _End], width: int = width) -> tuple[State, _End]:
                return _verify_and_commit(*arguments, width, before[0])

            after, end = apply_if(narrowest == number, run, (after, end))

    participated = end.count > 0
    column = {
        "width": jnp.broadcast_to(jnp.asarray(plan.widths, jnp.int32)[narrowest], drafted.shape),
        "drafted": drafted,
        "accepted": end.num_accepted,
        "emitted": end.count,
        "drafter": proposal.drafter,
    }
    rounds = Rounds(**{name: jnp.where(participated, new, -1) for name, new in column.items()})
    if plan.overlaps:
        overlaps = jnp.where(participated[:, None], end.overlaps, jnp.nan)
        rounds = rounds.replace(overlaps=overlaps)
    return after, rounds, _tally(plan, proposal, end, participated)


class _End(NamedTuple):
    """The end of a round in each row: what was accepted, and how many tokens were committed.

    `path_slots`, the accepted nodes, and `overlaps` are padded to the longest path of a draft.
    """

    count: Int[Array, "B"]
    num_accepted: Int[Array, "B"]
    path_slots: Int[Array, "B P"]
    overlaps: Float[Array, "B P"] | None


def _no_end(plan: LoopPlan, draft: Draft) -> _End:
    """Return the end of a round in which nothing has been verified yet."""
    rows, longest = len(draft.tokens), draft.topology.depth
    none = jnp.zeros(rows, jnp.int32)
    overlaps = jnp.full((rows, longest), jnp.nan) if plan.overlaps else None
    return _End(none, none, jnp.full((rows, longest), -1, jnp.int32), overlaps)


def _verify_and_commit(
    plan: LoopPlan, params: Any, draft: Draft, keys: Key[Array, "B"], width: int, state: State
) -> tuple[State, _End]:
    """Return the state after verifying a draft at one compiled width, and the end of the round.

    The tokens, keys, values and features of the root and of the accepted path are appended.
    """
    target_params, draft_params = params
    verified = verify_draft(plan, target_params, state, draft, keys, width)
    count, status, undrafted = _truncate(state, verified, draft.valid.any(axis=1))
    drafter_state = state.drafter
    if verified.target_pass is not None:
        drafter_state = plan.drafter.observe_pass(draft_params, drafter_state, verified.target_pass)
    after = _commit(plan, state, verified, count, status).replace(
        undrafted=undrafted,
        drafter=plan.drafter.commit(drafter_state, count),
        round=state.round + (count > 0),
    )
    path, longest = verified.verification.path_slots, draft.topology.depth
    path = jnp.pad(path, ((0, 0), (0, longest - path.shape[1])), constant_values=-1)
    accepted = verified.verification.num_accepted.astype(jnp.int32)
    return after, _End(count, accepted, path.astype(jnp.int32), verified.overlaps)


def propose(plan: LoopPlan, params: Any, state: State, limits: StepLimits) -> Proposal:
    """Return the drafters' proposal for this round within `limits`, with their new states.

    `params` are the target's and the drafters' parameters. Raises ValueError for a tree under a
    rule that verifies chains only.
    """
    target_params, draft_params = params
    context = make_context(plan, target_params, state)
    noise = proposal_noise(plan, state, noise_keys(plan, draft_params, state))
    proposal = plan.drafter.propose(draft_params, state.drafter, context, noise, limits)
    draft = proposal.draft
    if not (draft.topology.is_chain or plan.rule.takes_trees):
        raise ValueError(
            f"drafter {plan.drafter.name!r} proposes a tree: {plan.rule.name} verifies chains, so "
            "build drafts with trees.chain"
        )
    within = draft.topology.row_depths[:, 1:] <= context.limit[:, None]
    # A token outside the target's vocabulary has no embedding, and would spoil the whole row.
    within &= (draft.tokens >= 0) & (draft.tokens < plan.target.vocab_size)
    if draft.logq is not None and draft.logq.size:
        # No token can be drawn if all logits are -inf, or one is NaN or inf.
        drawn = jnp.isfinite(jnp.max(draft.logq, axis=-1))
        drawn = jnp.take_along_axis(drawn, jnp.maximum(draft.logq_row, 0), axis=1)
        within &= drawn | (draft.logq_row < 0)
    if (allowed := allowed_nodes(plan.processors, state.processors, draft)) is not None:
        within &= allowed
    valid = draft.topology.close(draft.valid & within)
    # Where a width is timed, unused slots read the experts that a draft of that width would.
    is_timed = limits.least_width > 1
    unused = jnp.where(is_timed, different_tokens(*valid.shape, plan.target.vocab_size), 0)
    draft = draft.replace(valid=valid, tokens=jnp.where(valid, draft.tokens, unused))
    return proposal._replace(draft=draft)


def different_tokens(rows: int, count: int, vocab_size: int) -> Int[Array, "B N"]:
    """Return `count` tokens per row, all different in a large vocabulary.

    Passes that are timed need them: equal tokens use the same experts, and only the experts that
    some token uses are read.
    """
    numbers = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)
    return _STRIDE * (1 + numbers) % vocab_size


def _truncate(
    state: State, verified: VerifiedDraft, drafted: Bool[Array, "B"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Bool[Array, "B"]]:
    """Return each row's number of tokens to commit, its new status, and its new `undrafted` flag.

    The accepted path is cut after the first stop token, at the row's maximum length, and before the
    first token whose logits are not numbers, or where processors leave no token. The draft may have
    spoiled logits, even where it is refused, since in attention a weight of 0 times NaN is NaN. So
    the row drafts no more, and fails only if this happens without a draft. `drafted` marks the rows
    with a draft.
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
    wrong, ended = ~verified.numbers, FAILED
    if verified.some_left is not None:
        ended = jnp.where(wrong[:, 0], FAILED, BARRED)
        wrong |= ~verified.some_left
    broken = wrong & (step < count[:, None])
    failed = broken.any(axis=1)
    count = jnp.where(failed, jnp.argmax(broken, axis=1), count)
    status = jnp.where(failed, jnp.where(drafted, RUNNING, ended), status)
    return (
        jnp.where(state.active, count, 0).astype(jnp.int32),
        jnp.where(state.active, status, state.status),
        state.undrafted | (failed & state.active),
    )


def _commit(
    plan: LoopPlan,
    state: State,
    verified: VerifiedDraft,
    count: Int[Array, "B"],
    status: Int[Array, "B"],
) -> State:
    """Return the state after committing the first `count` tokens of each row, with new `status`.

    The keys and values of the root and of the accepted path are appended to the cache.
    """
    step = jnp.arange(verified.tokens.shape[1])[None, :]
    where = jnp.where(step < count[:, None], state.length[:, None] + step, state.tokens.shape[1])
    slots = jnp.pad(jnp.maximum(verified.verification.path_slots, 0), ((0, 0), (1, 0)))
    logprobs = state.logprobs
    if verified.logprobs is not None:
        logprobs = put(logprobs, where, verified.logprobs)
    features = {}
    for name, kept in state.features.items():
        # The features of the root and of the path go to their positions modulo M.
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
        processors=advanced(plan.processors, state.processors, verified.tokens, count),
    )


def no_tally(plan: LoopPlan) -> Tally:
    """Return the counts by drafter of a step without rounds, all 0."""
    drafters, nodes = len(plan.drafter.parts), plan.drafter.num_nodes
    none, of_nodes = jnp.zeros(drafters, jnp.int32), jnp.zeros((drafters, nodes), jnp.int32)
    return Tally(none, none, of_nodes, of_nodes)


def _tally(plan: LoopPlan, proposal: Proposal, end: _End, participated: Bool[Array, "B"]) -> Tally:
    """Return one round's counts by drafter; `participated` marks rows with new tokens."""
    valid = proposal.draft.valid
    numbers = jnp.arange(len(plan.drafter.parts))
    turn = (proposal.drafter[None, :] == numbers[:, None]) & participated[None, :]
    slots = jnp.arange(1, valid.shape[1] + 1)[None, None, :]
    accepted = (end.path_slots[:, :, None] == slots).any(axis=1)
    return Tally(
        ran=proposal.ran.astype(jnp.int32),
        further=proposal.further.astype(jnp.int32),
        drafted=(turn[:, :, None] & valid[None]).any(axis=1).astype(jnp.int32),
        accepted=(turn[:, :, None] & (accepted & valid)[None]).sum(axis=1, dtype=jnp.int32),
    )


def make_context(plan: LoopPlan, params: Any, state: State) -> Context:
    """Return what drafters may read of a state.

    `params` are the target's parameters.
    """
    # Limit drafts to the tokens that the row may still emit, minus the bonus token.
    room = state.rows.max_length - state.length - 1
    drafts = state.active & ~state.undrafted
    limit = jnp.where(drafts, jnp.clip(room, 0, plan.drafter.num_speculative_tokens), 0)
    return Context(
        tokens=state.tokens,
        length=state.length,
        limit=limit,
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
        full_drafts=plan.full_drafts,
        resumes=plan.resumes,
        processors=plan.processors,
        processor_states=state.processors,
    )


def noise_keys(plan: LoopPlan, draft_params: Any, state: State) -> Key[Array, "B"]:
    """Return each row's key for the noise of its next round.

    This is the row key if the rule's noise depends on positions only. Otherwise it depends on the
    texts in the drafters' parameters, in which outputs of the same seed may stand.
    """
    if plan.rule.position_noise:
        return state.rows.key
    keys = sampling.fold_round(state.rows.key, state.round)
    for digest in plan.drafter.text_digests(draft_params):
        keys = sampling.derive_from_text(keys, digest)
    return keys


def proposal_noise(plan: LoopPlan, state: State, keys: Key[Array, "B"]) -> Noise:
    """Return the noise from which drafters draw in a round; `keys` come from `noise_keys`."""
    vocab = plan.target.vocab_size
    if plan.rule.position_noise:
        return sampling.SharedNoise(sampling.coupled_noise(keys, state.length, vocab))
    return sampling.draft_noise(keys, vocab)
