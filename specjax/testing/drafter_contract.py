"""A run of the contract that every drafter must keep; `check_drafter` runs it first."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.core.drafter_check import check_contents, check_rows_first, single_drafters
from specjax.core.plan import LoopPlan
from specjax.core.round import make_context, noise_keys, proposal_noise
from specjax.core.state import State
from specjax.core.turn_taking import check_proposal
from specjax.engine.programs import start
from specjax.trees import Draft


def check_contract(loop_plan: LoopPlan, params: tuple[Any, Any], arguments: tuple) -> None:
    """Raise InputError, naming the drafter, if one of a plan's drafters breaks its contract.

    Every leaf of the drafter's state must have rows as its first axis or belong to a cache or a
    window; a draft must have `num_nodes` nodes, and arrays that agree (`trees.draft`); no row
    may propose a path longer than `context.limit`; valid nodes must come after their parents, have
    valid ancestors and name log-probabilities. `params` are the target's and the drafters'
    parameters, and `arguments` those of `initial_state.start`; each row gets a different limit.
    Parts of a merged drafter are checked one by one.
    """
    parts = list(single_drafters(loop_plan.drafter.parts, params[1]))
    for part, part_params in parts:
        check_rows_first(part, part_params)
    for number, (part, _) in enumerate(parts):
        if part.num_speculative_tokens:
            _check_draft(loop_plan, params, arguments, number)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(
    loop_plan: LoopPlan, number: int, params: tuple[Any, Any], state: State
) -> tuple[Draft, Int[Array, "B"]]:
    """Return the first draft of the single drafter `number`, and the limits of its rows."""
    states = tuple(part.drafter for part in state.drafter)
    part, part_params, own = list(single_drafters(loop_plan.drafter.parts, params[1], states))[
        number
    ]
    context = make_context(loop_plan, params[0], state)
    limit = jnp.arange(len(context.limit)) % (1 + part.num_speculative_tokens)
    context = context.replace(limit=jnp.minimum(limit, context.limit))
    noise = proposal_noise(loop_plan, state, noise_keys(loop_plan, params[1], state))
    noise = noise.part(number, branches=part.branches)
    proposal = part.propose(part_params, own, context, noise)
    return check_proposal(part, proposal, own, context)[0], context.limit


def _check_draft(
    loop_plan: LoopPlan, params: tuple[Any, Any], arguments: tuple, number: int
) -> None:
    """Raise InputError if the first draft of the single drafter `number` breaks the contract."""
    part, _ = list(single_drafters(loop_plan.drafter.parts, params[1]))[number]
    draft, limit = _propose(loop_plan, number, params, start(loop_plan, params, *arguments))
    check_contents(part, draft, limit, loop_plan.target.vocab_size)
