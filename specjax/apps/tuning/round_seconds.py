"""Measure the seconds of a round, without drafting, by pass width."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax.apps.tuning import measure_costs
from specjax.core.cache import KVCache
from specjax.core.drafter import Context, Noise
from specjax.core.initial_state import empty_state
from specjax.core.loop import run as run_rounds
from specjax.core.plan import LoopPlan
from specjax.core.round import different_tokens
from specjax.core.state import Rounds
from specjax.drafters import Drafter
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.programs import row_arguments
from specjax.engine.requests import SamplingParams
from specjax.loading.model import Model
from specjax.trees import Draft, Topology

_ROUNDS = 4
"""The number of rounds that are timed together."""


def new_tokens(depth: int) -> int:
    """Return how many new tokens a row must have room for in the timed rounds.

    `depth` is the length of the longest path.
    """
    return _ROUNDS * (depth + 1) + 1


def rounds_seconds(
    target: Model,
    drafter: Drafter,
    topology: Topology,
    widths: Sequence[int],
    *,
    batch_size: int,
    context: int,
) -> dict[int, float]:
    """Return the median seconds of a greedy round at each width, without its drafting time.

    Drafts are the first nodes of `topology`, with one program per number of nodes; width 1 is plain
    decoding. Widths are timed alternately. `drafter` determines which features of the target are
    kept (its `observe_pass` is not timed). Rows have `context` tokens, and the target must have
    room for `new_tokens` more. Raises ValueError for a width beyond the nodes of the topology.
    """
    if max(widths) > topology.width:
        raise ValueError(
            f"widths={tuple(widths)}: the topology has {topology.num_nodes} nodes; give one of "
            f"{max(widths) - 1}"
        )
    last = different_tokens(batch_size, 1, target.config.vocab_size).tolist()
    prompts = [[1] * (context - 1) + token for token in last]
    sampling = SamplingParams(max_new_tokens=new_tokens(topology.depth), ignore_eos=True)
    # One cache is passed from call to call and updated in place, as in decoding.
    cache: KVCache | None = None

    def call(width: int) -> Callable[[], Rounds]:
        free = FreeTree(
            topology=topology.first(width - 1),
            accepted=drafter.features,
            computed=drafter.pass_features,
        )
        plan, requests = plan_requests(
            target,
            prompts,
            drafter=free if width > 1 else None,
            options=DecodeOptions(batch_size=batch_size),
            sampling=sampling,
        )
        # Only this width and plain decoding's are compiled, so that there is one program per width.
        loop_plan, params = replace(plan.loop, widths=tuple(sorted({1, width}))), plan.params
        rows = row_arguments(plan, requests)

        def run() -> Rounds:
            nonlocal cache
            if cache is None:
                make = jax.jit(loop_plan.target.make_cache, static_argnums=(0, 1))
                cache = make(plan.num_rows, loop_plan.capacity)
            cache, rounds = _run(loop_plan, params, cache, *rows)
            return rounds

        return run

    seconds = measure_costs.median_seconds(*map(call, widths))
    return {width: spent / _ROUNDS for width, spent in zip(widths, seconds, strict=True)}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _run(loop_plan: LoopPlan, params: Any, cache: KVCache, *rows: Any) -> tuple[KVCache, Rounds]:
    """Return the cache after the timed rounds, and their counts.

    The cache has the prompts of all rows already.
    """
    state = empty_state(loop_plan, params, *rows)
    state = state.replace(cache=cache.replace(length=state.length - 1))
    state, rounds, _ = run_rounds(loop_plan, params, state, jnp.int32(_ROUNDS))
    return state.cache, rounds


@dataclass(frozen=True, kw_only=True)
class FreeTree(Drafter):
    """A drafter whose tree has the same tokens in each round, so that drafting costs nothing.

    It requests features of the target: `accepted` are the names of those of accepted tokens, and
    `computed` of those of all tokens in a pass.
    """

    topology: Topology
    accepted: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_speculative_tokens", self.topology.depth)

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N)."""
        return self.topology.num_nodes

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features of accepted tokens."""
        return self.accepted

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The names of the features of whole passes."""
        return self.computed

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Return all nodes within each row's limit; siblings and rows have distinct tokens."""
        del params, noise
        shape = (len(context.length), self.num_nodes)
        return Draft(
            tokens=different_tokens(*shape, context.target.vocab_size),
            valid=jnp.asarray(self.topology.depths[1:])[None] <= context.limit[:, None],
            logq_row=jnp.full(shape, -1, jnp.int32),
            logq=None,
            topology=self.topology,
        ), state
