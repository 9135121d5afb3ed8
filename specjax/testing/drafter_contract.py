"""The contract that every drafter must keep; `check_drafter` checks it first."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.decoding.plan import Plan
from specjax.decoding.programs import start
from specjax.decoding.round import make_context, noise_keys, proposal_noise
from specjax.decoding.state import State, knows_its_rows
from specjax.drafters.turn_taking import check_proposal, check_size
from specjax.errors import InputError
from specjax.trees import Draft


def check_contract(plan: Plan, params: tuple[Any, Any], arguments: tuple) -> None:
    """Raise InputError, naming the drafter, if one of a plan's drafters breaks its contract.

    Every leaf of the drafter's state must have rows as its first axis or belong to a cache or a
    window; a draft must have `num_nodes` nodes; no row may propose a path longer than
    `context.limit`; valid nodes must come after their parents and have valid ancestors. `params`
    are the target's and the drafters' parameters, and `arguments` those of `initial_state.start`;
    each row gets a different limit.
    """
    for part, part_params in zip(plan.drafter.parts, params[1], strict=True):
        for rows in (3, 5):
            init = lambda params, part=part, rows=rows: part.init(params, rows, 8)  # noqa: E731
            state = jax.eval_shape(init, part_params)
            for leaf in jax.tree.leaves(state, is_leaf=knows_its_rows):
                if not knows_its_rows(leaf) and leaf.shape[:1] != (rows,):
                    raise InputError(
                        f"drafter {part.name!r}: its state holds an array of shape "
                        f"{list(leaf.shape)} for {rows} rows; every array needs rows as its first "
                        "axis"
                    )
    for number, part in enumerate(plan.drafter.parts):
        if part.num_speculative_tokens:
            _check_draft(plan, params, arguments, number)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(
    plan: Plan, number: int, params: tuple[Any, Any], state: State
) -> tuple[Draft, Int[Array, "B"]]:
    """Return the first draft of drafter `number` of a plan, and the limits of its rows."""
    part = plan.drafter.parts[number]
    context = make_context(plan, params[0], state)
    limit = jnp.arange(len(context.limit)) % (1 + part.num_speculative_tokens)
    context = context.replace(limit=jnp.minimum(limit, context.limit))
    noise = proposal_noise(plan, state, noise_keys(plan, params[1], state))
    noise = noise.part(number, branches=part.branches)
    own = state.drafter[number].drafter
    proposal = part.propose(params[1][number], own, context, noise)
    return check_proposal(part, proposal, own)[0], context.limit


def _check_draft(plan: Plan, params: tuple[Any, Any], arguments: tuple, number: int) -> None:
    """Raise InputError if the first draft of drafter `number` breaks the contract."""
    part = plan.drafter.parts[number]
    draft, limit = _propose(plan, number, params, start(plan, params, *arguments))
    check_size(part, draft)
    valid, tokens = np.asarray(draft.valid), np.asarray(draft.tokens)
    vocab = plan.target.vocab_size
    unknown = valid & ((tokens < 0) | (tokens >= vocab))
    if unknown.any():
        raise InputError(
            f"drafter {part.name!r}: proposes token {tokens[unknown][0]}, out of range "
            f"0..{vocab - 1}; make such nodes invalid"
        )
    parents = np.broadcast_to(draft.topology.row_parents, valid.shape)
    late = valid & ((parents < 0) | (parents > np.arange(valid.shape[1])))
    if late.any():
        row, node = np.argwhere(late)[0]
        raise InputError(
            f"drafter {part.name!r}: node {node} of row {row} has the parent slot "
            f"{parents[row, node]}; use 0 to {node}, the slots of the root and of earlier nodes"
        )
    depths = np.where(valid, draft.topology.row_depths[:, 1:], 0).max(axis=1, initial=0)
    if (depths > limit).any():
        row = int(np.argmax(depths > limit))
        raise InputError(
            f"drafter {part.name!r}: proposes more than its limit, {depths[row]} tokens where "
            f"context.limit is {limit[row]}; make the nodes beyond it invalid"
        )
    if not (np.asarray(draft.topology.close(draft.valid)) == valid).all():
        raise InputError(
            f"drafter {part.name!r}: its valid nodes are not closed under ancestors: a node whose "
            "parent was never proposed cannot be verified; make it invalid"
        )
