"""The state before the first round, and the prefill of prompts into it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from specjax.core.cache import KVCache, put
from specjax.core.drafter import Accepted, TargetPass
from specjax.core.plan import LoopPlan
from specjax.core.prefill import prefill
from specjax.core.processor import states_of
from specjax.core.round import make_context
from specjax.core.state import RowProperties, State
from specjax.distributed.sharding import constrain_rows

_ROWS_FIRST = (
    *("tokens", "length", "status", "undrafted", "features", "rows", "round", "logprobs"),
    "processors",
)
"""The fields of a state whose first axis, the rows, is sharded over devices."""


def start(
    plan: LoopPlan,
    params: Any,
    tokens: Int[Array, "B S"],
    rows: RowProperties,
    length: Int[Array, "B"],
    status: Int[Array, "B"],
    rounds: Int[Array, "B"] | None = None,
    requested: tuple[Any, ...] = (),
) -> State:
    """Return the state before the first round, with all but the last token of each prompt read.

    `params` are the target's and the drafters' parameters. `tokens` has the prompts, of `length`
    tokens each, `rows` are the rows' fixed properties, and `status` is that of each row, such as
    RUNNING. `requested` are the arrays that each processor of the plan reads of its rows.
    """
    empty = empty_state(plan, params, tokens, rows, length, status, rounds, requested)
    return read_prompts(plan, params, empty)


def read_prompts(
    plan: LoopPlan,
    params: Any,
    state: State,
    begin: Int[Array, ""] | int = 0,
    end: Int[Array, ""] | int | None = None,
) -> State:
    """Run target and drafter over positions `begin` to `end` (exclusive) of each row's prompt.

    Returns the state with the cache and the drafters' states advanced. `params` are the target's
    and the drafters' parameters. Positions before `begin` must have been read. `end` is rounded up
    to a multiple of the smallest chunk; by default each prompt is read up to, but without, its last
    token.
    """
    target_params, draft_params = params
    drafter, length = plan.drafter, state.length

    def observe(
        carry: tuple[Any, dict[str, Array]],
        cache: KVCache,
        first: Int[Array, ""],
        count: Int[Array, "B"],
        features: dict[str, Array],
        size: int,
    ) -> tuple[Any, dict[str, Array]]:
        carry, kept = carry
        recorded = _named(features, plan.recording.features)
        kept = {**kept, **_recorded(kept, recorded, first, count)}
        # The length of each row's tokens that have been read, and the token after them.
        known = jnp.clip(length - 1, 0, first + count) + 1
        context = make_context(plan, target_params, state.replace(length=known, cache=cache))
        following = context.tokens_from(jnp.broadcast_to(first + 1, count.shape), size)
        if drafter.pass_features:
            chunk = context.tokens_from(jnp.broadcast_to(first, count.shape), size)
            step = jnp.arange(size)[None, :]
            parents = jnp.broadcast_to(jnp.maximum(step - 1, 0), chunk.shape)
            carry = drafter.observe_pass(
                draft_params,
                carry,
                TargetPass(
                    chunk,
                    parents,
                    step < count[:, None],
                    _named(features, drafter.pass_features),
                ),
            )
        accepted = Accepted(following, count, _named(features, drafter.prompt_features))
        return drafter.observe_prompt(draft_params, carry, context, accepted), kept

    names = (*drafter.prompt_features, *drafter.pass_features, *plan.recording.features)
    cache, (drafter_state, kept) = prefill(
        plan.target,
        target_params,
        state.tokens,
        length - 1,
        state.cache,
        plan.chunks,
        tuple(dict.fromkeys(names)),
        observe,
        (state.drafter, state.features),
        begin,
        end,
    )
    return state.replace(cache=cache, drafter=drafter_state, features=kept)


def _recorded(
    kept: dict[str, Shaped[Array, "B M _"]],
    features: dict[str, Float[Array, "B T D"]],
    first: Int[Array, ""],
    count: Int[Array, "B"],
) -> dict[str, Float[Array, "B M D"]]:
    """Return what is kept of each row by name, with the features of a chunk of its prompt.

    The chunk has `count[b]` tokens of row b, from position `first` on.
    """
    new = {}
    for name, values in features.items():
        size, steps = kept[name].shape[1], jnp.arange(values.shape[1])[None, :]
        last = (steps < count[:, None]) & (steps >= count[:, None] - size)
        new[name] = put(kept[name], jnp.where(last, (first + steps) % size, size), values)
    return new


def _named(features: dict[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
    """Return the features with the given names."""
    return {name: features[name] for name in names}


def empty_state(
    plan: LoopPlan,
    params: Any,
    tokens: Int[Array, "B S"],
    rows: RowProperties,
    length: Int[Array, "B"],
    status: Int[Array, "B"],
    rounds: Int[Array, "B"] | None = None,
    requested: tuple[Any, ...] = (),
) -> State:
    """Return the state of rows whose tokens are unread; arguments are those of `start`."""
    batch = tokens.shape[0]
    target_params, draft_params = params
    target, drafter = plan.target, plan.drafter
    kept = plan.kept_features
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
        round=jnp.zeros(batch, jnp.int32) if rounds is None else rounds,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        processors=states_of(
            plan.processors, requested, tokens, rows.prompt_length, length, target.vocab_size
        ),
    )
    return state.replace(**{name: constrain_rows(getattr(state, name)) for name in _ROWS_FIRST})


def _feature_shapes(
    plan: LoopPlan, params: Any, tokens: Int[Array, "B S"]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes [B, 1, D] and dtypes of a plan's features of one token per row."""
    if not plan.features:
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
            features=plan.features,
            logits=False,
        ).features

    return jax.eval_shape(extend, params)
