"""The contract that every drafter must keep; `check_drafter` checks it first."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.plan import LoopPlan
from specjax.core.round import make_context, noise_keys, proposal_noise
from specjax.core.state import State, knows_its_rows
from specjax.core.turn_taking import check_proposal
from specjax.drafters import Drafter, Merged
from specjax.engine.programs import start
from specjax.errors import InputError
from specjax.trees import Draft
from specjax.trees.draft import check_draft

_NORMALISED = 1e-2
"""The tolerance for sums of probabilities, wide enough for half precision."""


def check_contract(loop_plan: LoopPlan, params: tuple[Any, Any], arguments: tuple) -> None:
    """Raise InputError, naming the drafter, if one of a plan's drafters breaks its contract.

    Every leaf of the drafter's state must have rows as its first axis or belong to a cache or a
    window; a draft must have `num_nodes` nodes, and arrays that agree (`trees.draft`); no row
    may propose a path longer than `context.limit`; valid nodes must come after their parents, have
    valid ancestors and name log-probabilities. `params` are the target's and the drafters'
    parameters, and `arguments` those of `initial_state.start`; each row gets a different limit.
    Parts of a merged drafter are checked one by one.
    """
    parts = list(_single(loop_plan.drafter.parts, params[1]))
    for part, part_params in parts:
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
    for number, (part, _) in enumerate(parts):
        if part.num_speculative_tokens:
            _check_draft(loop_plan, params, arguments, number)


def _single(drafters: tuple[Drafter, ...], *values: tuple) -> Iterator[tuple]:
    """Yield each drafter with its entries of `values`, and the parts of merged ones in its place.

    `values` are tuples of parameters or states, nested like the drafters.
    """
    for drafter, *own in zip(drafters, *values, strict=True):
        if isinstance(drafter, Merged):
            yield from _single(drafter.parts, *own)
        else:
            yield drafter, *own


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(
    loop_plan: LoopPlan, number: int, params: tuple[Any, Any], state: State
) -> tuple[Draft, Int[Array, "B"]]:
    """Return the first draft of drafter `number` of `_single`, and the limits of its rows."""
    states = tuple(part.drafter for part in state.drafter)
    part, part_params, own = list(_single(loop_plan.drafter.parts, params[1], states))[number]
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
    """Raise InputError if the first draft of drafter `number` of `_single` breaks the contract."""
    part, _ = list(_single(loop_plan.drafter.parts, params[1]))[number]
    draft, limit = _propose(loop_plan, number, params, start(loop_plan, params, *arguments))
    check_draft(draft, f"drafter {part.name!r}: propose returned")
    valid, tokens = np.asarray(draft.valid), np.asarray(draft.tokens)
    vocab = loop_plan.target.vocab_size
    unknown = valid & ((tokens < 0) | (tokens >= vocab))
    if unknown.any():
        raise InputError(
            f"drafter {part.name!r}: proposes token {tokens[unknown][0]}, out of range "
            f"0..{vocab - 1}; make such nodes invalid"
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
    if draft.logq is not None:
        row = np.asarray(draft.logq_row)
        mass = np.exp(np.asarray(draft.logq, np.float32)).sum(axis=2)
        mass = np.where(row >= 0, np.take_along_axis(mass, np.maximum(row, 0), axis=1), 1)
        # A distribution without tokens is left out by the loop, as is one with NaN.
        off = valid & (np.abs(mass - 1) >= _NORMALISED) & (mass > 0)
        if off.any():
            index, node = np.argwhere(off)[0]
            raise InputError(
                f"drafter {part.name!r}: propose returned logq[{index}, {row[index, node]}] whose "
                f"probabilities sum to {mass[index, node]:.4g}; return log-probabilities, such as "
                "context.draw gives"
            )
