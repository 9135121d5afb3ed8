"""What rounds take by the width of their pass, where drafting costs nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.decoding import costs, loop
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import plan_session
from specjax.decoding.rows import batch_arguments
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.state import Plan, State
from specjax.drafters import Drafter, LoadedDrafter
from specjax.drafters.base import Context, Noise
from specjax.loading.model import Model
from specjax.trees import Draft, Topology

_ROUNDS = 4
"""In a row that are timed together."""

_run = jax.jit(loop.run, static_argnums=0)


def rounds_seconds(
    target: Model,
    drafter: Drafter,
    topology: Topology,
    widths: Sequence[int],
    *,
    batch_size: int,
    context: int,
) -> dict[int, float]:
    """Median seconds of a greedy round by the slots of its pass, all but what its draft takes.

    Drafts are the first nodes of `topology`, which has one less than the widest pass has slots.
    Width 1 is a round of plain decoding. All are timed in turn. `drafter` says which of the
    target's features are kept; rows have `context` tokens.
    """
    free = FreeTree(
        num_speculative_tokens=topology.depth,
        topology=topology,
        node_counts=tuple(width - 1 for width in widths if width > 1),
        accepted=drafter.features,
        computed=drafter.pass_features,
    )
    states: dict[Plan, State] = {}

    def call(width: int) -> Callable[[], Any]:
        session = plan_session(
            target,
            [[1] * context] * batch_size,
            drafter=LoadedDrafter(free, jnp.int32(width - 1)) if width > 1 else None,
            options=DecodeOptions(batch_size=batch_size),
            requests=SamplingParams(
                max_new_tokens=_ROUNDS * (topology.depth + 1) + 1, ignore_eos=True
            ),
        )
        plan, params = session.plan, session.params
        if plan not in states:
            rows = batch_arguments(session, range(batch_size))
            states[plan] = _read(plan, params, *rows)
        return lambda: _run(plan, params, states[plan], jnp.int32(_ROUNDS))

    seconds = costs.median_seconds(*map(call, widths))
    return {width: spent / _ROUNDS for width, spent in zip(widths, seconds, strict=True)}


@functools.partial(jax.jit, static_argnums=0)
def _read(plan: Plan, params: Any, *rows: Any) -> State:
    """Rows with empty caches that are as long as if their prompts had been read."""
    state = loop.empty_state(plan, params, *rows)
    return state.replace(cache=state.cache.replace(length=state.length - 1))


@dataclass(frozen=True, kw_only=True)
class FreeTree(Drafter):
    """A tree of tokens that are always the same, of which `params` nodes are proposed.

    What it costs is what the loop does with a draft. `node_counts` are those that have a compiled
    width of their own. Of the target's passes it takes the features `accepted` and `computed`, as
    the drafter does whose rounds are timed.
    """

    topology: Topology
    node_counts: tuple[int, ...]
    accepted: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return self.topology.num_nodes

    @property
    def features(self) -> tuple[str, ...]:
        """Those of accepted tokens."""
        return self.accepted

    @property
    def pass_features(self) -> tuple[str, ...]:
        """Those of whole passes."""
        return self.computed

    @property
    def lengths(self) -> tuple[int, ...]:
        """`node_counts`."""
        return self.node_counts

    def propose(
        self, params: Int[Array, ""], state: Any, context: Context, noise: Noise
    ) -> tuple[Draft, Any]:
        """The first nodes."""
        del noise
        shape = (len(context.length), self.num_nodes)
        # Different tokens, since of experts only those are read that some token uses.
        tokens = 7919 * jnp.arange(1, shape[1] + 1, dtype=jnp.int32) % context.target.vocab_size
        return Draft(
            tokens=jnp.broadcast_to(tokens, shape),
            valid=jnp.broadcast_to(jnp.arange(shape[1]) < params, shape),
            logq_row=jnp.full(shape, -1, jnp.int32),
            logq=None,
            topology=self.topology,
        ), state
