"""The compiled loop over rounds: steps of a few rounds, and their results for the host.

Everything in this module is traced.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.core.drafter import StepLimits
from specjax.core.plan import LoopPlan
from specjax.core.round import no_tally, one_round
from specjax.core.state import (
    RUNNING,
    STOPPED,
    Packed,
    Rounds,
    Seen,
    State,
    Tally,
    cached_lengths,
    release,
    with_pages,
)
from specjax.distributed.sharding import constrain_rows


def step(
    plan: LoopPlan,
    params: Any,
    state: State,
    limits: StepLimits,
    host_ended: Bool[Array, "B"],
    max_rounds: Int[Array, ""],
    stop_after_finished: Int[Array, ""],
    pages: Int[Array, "B N"] | None = None,
) -> tuple[State, Packed]:
    """Run a few rounds, as `run` does; return the new state, and what the host reads (`Seen`).

    Rows that finished earlier, and those marked in `host_ended`, which the host ended, are released
    first, so that their caches are no longer read. If caches are pools, `pages` are those of each
    row.
    """
    if pages is not None:
        state = with_pages(state, pages)
    status = jnp.where(host_ended & state.active, STOPPED, state.status)
    finished = status != RUNNING
    # `release` marks rows as stopped, but a failed row must keep its status.
    state = release(state, finished).replace(status=status)
    first = state.length
    state, rounds, tally = run(plan, params, state, max_rounds, stop_after_finished, limits)
    most = plan.rounds_per_step * (plan.drafter.num_speculative_tokens + 1)
    new = first[:, None] + jnp.arange(min(most, plan.capacity))[None, :]
    new = jnp.minimum(new, plan.capacity - 1)
    seen = Seen(
        status=state.status,
        tokens=jnp.take_along_axis(state.tokens, new, axis=1),
        logprobs=jnp.take_along_axis(state.logprobs, new, axis=1) if plan.logprobs else None,
        rounds=rounds,
        tally=tally,
    )
    if pages is not None:
        seen = seen.replace(cached=cached_lengths(state))
        state = with_pages(state, None)
    return state, Packed.of(seen)


def run(
    plan: LoopPlan,
    params: Any,
    state: State,
    max_rounds: Int[Array, ""],
    stop_after_finished: Int[Array, ""] | None = None,
    limits: StepLimits | None = None,
) -> tuple[State, Rounds, Tally]:
    """Run rounds until all rows, or `stop_after_finished` of them, have finished.

    At most `max_rounds` rounds run, and no more than `plan.rounds_per_step` (R), the number of
    columns of the counts; both numbers are traced. Without `limits` drafts have their full length.
    Returns the new state, the counts [B, R] by row and round, and the counts by drafter.
    """
    batch, columns = len(state.length), plan.rounds_per_step
    enough = batch if stop_after_finished is None else jnp.minimum(stop_after_finished, batch)
    most = jnp.minimum(max_rounds, columns)
    none = jnp.full((batch, columns), -1, jnp.int32)
    overlaps = None
    if plan.overlaps:
        overlaps = jnp.full((batch, columns, plan.drafter.num_speculative_tokens), jnp.nan)
    rounds = constrain_rows(Rounds(none, none, none, none, none, overlaps))

    def going(carry: tuple[Array, State, Rounds, Tally]) -> Array:
        done, state, _, _ = carry
        return (done < most) & (batch - state.active.sum() < enough)

    def advance(
        carry: tuple[Array, State, Rounds, Tally],
    ) -> tuple[Array, State, Rounds, Tally]:
        done, state, rounds, tally = carry
        state, counts, of_round = one_round(plan, params, state, limits)
        rounds = jax.tree.map(
            lambda into, new: lax.dynamic_update_index_in_dim(into, new, done, 1), rounds, counts
        )
        return done + 1, state, rounds, jax.tree.map(jnp.add, tally, of_round)

    return lax.while_loop(going, advance, (jnp.int32(0), state, rounds, no_tally(plan)))[1:]
