"""What drafters keep of the target's passes: compared with passes of their own over each path.

It depends on which tokens were drafted, so that rows that begin anew have less of it: a table has
candidates after refused tokens, a window has guesses of each round. So a state is compared with
what it makes of the state before the round and of a pass in which each drafted path is a row of its
own, without a cache; and what follows from the committed tokens alone with that of a fresh state.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from conformance.cells import CAPACITY, ROWS, restarted
from conformance.methods import LENGTH, target
from decoding import caught_up

from specjax.core.drafter import TargetPass
from specjax.core.merged import Merged
from specjax.core.round import propose
from specjax.methods.lookahead import Lookahead
from specjax.methods.token_recycling import TokenRecycling

_WIDTH = CAPACITY + LENGTH


@functools.partial(jax.jit, static_argnums=0)
def after_a_pass(plan, params, state):
    """Return the drafters' states after a round's draft and a pass over each of its paths."""
    proposal = propose(plan, params, state, plan.drafter.full_limits())
    draft, topology, root = proposal.draft, proposal.draft.topology, state.length - 1
    slots = 1 + topology.num_nodes
    rows = lambda values: jnp.broadcast_to(values, (ROWS, *values.shape[1:]))  # noqa: E731
    depths = rows(jnp.asarray(topology.row_depths))
    last = jnp.take_along_axis(state.tokens, root[:, None], axis=1)
    tokens = jnp.concatenate([last, draft.tokens], axis=1)
    on_path = rows(jnp.asarray(topology.row_ancestors))
    at = jnp.where(on_path, (root[:, None] + depths)[:, None, :], _WIDTH)
    text = jnp.pad(state.tokens, ((0, 0), (0, _WIDTH - CAPACITY)))
    text = jnp.repeat(text, slots, axis=0)
    paths = text.at[jnp.arange(ROWS * slots)[:, None], at.reshape(-1, slots)].set(
        jnp.repeat(tokens, slots, axis=0), mode="drop"
    )
    model, features = target().architecture, {}
    found = model.extend(
        params[0],
        paths,
        jnp.broadcast_to(jnp.arange(_WIDTH), paths.shape),
        model.make_cache(len(paths), 0),
        model.make_window(*paths.shape),
        0,
        jnp.tril(jnp.ones((1, _WIDTH, _WIDTH), bool)),
        features=plan.drafter.pass_features,
        logits=False,
    )
    ends = jnp.minimum(root[:, None] + depths, _WIDTH - 1).reshape(-1, 1, 1)
    for name, values in found.features.items():
        values = jnp.take_along_axis(values, ends, axis=1)
        features[name] = values.reshape(ROWS, slots, -1)
    computed = jnp.pad(draft.valid, ((0, 0), (1, 0)), constant_values=True)
    parents = jnp.pad(rows(jnp.asarray(topology.row_parents)), ((0, 0), (1, 0)))
    one = TargetPass(tokens, parents, computed & state.active[:, None], features)
    after = plan.drafter.observe_pass(params[1], proposal.state, one)
    return tuple(part.drafter for part in after)


def kept_of_the_text(drafter, state):
    """Return, for each row, a set of what a drafter keeps of all text, whatever was drafted."""
    if isinstance(drafter, Merged):
        parts = map(kept_of_the_text, drafter.parts, state)
        return [set().union(*sets) for sets in zip(*parts, strict=True)]
    if isinstance(drafter, TokenRecycling):
        return [set(np.flatnonzero(table[:, 0] >= 0).tolist()) for table in np.asarray(state)]
    if isinstance(drafter, Lookahead):
        return [set(map(tuple, pool.tolist())) for pool in np.asarray(state.pool)]
    return [set() for _ in range(ROWS)]


def assert_remembered(program, before, after):
    """The state after a round is what its passes give, and has all that a fresh one has."""
    wanted = after_a_pass(program.plan, program.params, before)
    found = tuple(part.drafter for part in after.drafter)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    states = after, restarted(program, after)
    states = [caught_up(program.plan, program.params, state) for state in states]
    for drafter, state, fresh in zip(program.plan.drafter.parts, *states, strict=True):
        pairs = zip(kept_of_the_text(drafter, fresh), kept_of_the_text(drafter, state), strict=True)
        assert all(mine <= theirs for mine, theirs in pairs)
