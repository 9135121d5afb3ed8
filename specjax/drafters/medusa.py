"""Medusa heads draft from the target's last feature, all at once (Cai et al. 2401.10774).

Head i predicts the token i + 2 positions after the feature it reads, f_{n-2}; its distribution does
not depend on what the heads before it drew. A chain is drafted, one token a head.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.drafters.autoregressive import LeastProbability, SampleMethod, draft_chain
from specjax.drafters.base import Accepted, Context, Drafter, Noise
from specjax.fields import check_arguments
from specjax.models.heads.medusa import Medusa
from specjax.trees import Draft


@struct.dataclass
class State:
    """The target's `final_norm` at each row's position n - 2; zeros in a row of one token."""

    feature: Float[Array, "B D"]


def make(
    head: Medusa,
    params: Any,
    *,
    draft_sample_method: SampleMethod = "probabilistic",
    draft_p_min: LeastProbability = 0.0,
) -> Drafter:
    """A drafter of Medusa heads; `params` also hold "shared" and, for a part of V, "draft_ids".

    Options are those of a draft model. No more tokens are drafted than there are heads, whatever is
    asked for, and none in the first round of a row of one token, which has no feature. Raises
    InputError for bad options.
    """
    check_arguments(
        make, "drafter.", draft_sample_method=draft_sample_method, draft_p_min=draft_p_min
    )
    heads = head.config.num_heads

    def init(params: Any, context: Context, features: dict) -> State:
        del params
        return State(_at(features["final_norm"], context.length - 2))

    def propose(params: Any, state: State, context: Context, noise: Noise) -> tuple[Draft, State]:
        asked = max(min(heads, context.num_tokens), 1)
        every = _logits(head, params, state.feature, asked)

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], carry: tuple[()]
        ) -> tuple[Float[Array, "B Vd"], tuple[()]]:
            del token
            return lax.dynamic_index_in_dim(every, depth, axis=1, keepdims=False), carry

        limit = jnp.where(context.length > 1, jnp.minimum(context.limit, heads), 0)
        draft, _ = draft_chain(
            step,
            (),
            context.replace(limit=limit),
            noise,
            sampled=draft_sample_method == "probabilistic",
            p_min=draft_p_min,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(params: Any, state: State, context: Context, accepted: Accepted) -> State:
        del params, context
        # The last token is the target's own: its feature is not known yet.
        latest = _at(accepted.features["final_norm"], accepted.count - 1)
        return State(jnp.where((accepted.count > 0)[:, None], latest, state.feature))

    return Drafter(
        "medusa",
        init,
        propose,
        observe,
        num_speculative_tokens=heads,
        params=params,
        features=("final_norm",),
        sampled=draft_sample_method == "probabilistic",
    )


def _logits(
    head: Medusa, params: Any, feature: Float[Array, "B D"], asked: int
) -> Float[Array, "B K Vd"]:
    """What the first `asked` heads say; where they share one head, in one product."""
    states = head.states(params, feature[:, None])[:asked, :, 0]
    if head.config.original_lm_head:
        return head.logits(params, states.swapaxes(0, 1), 0)
    each = [head.logits(params, states[index][:, None], index) for index in range(asked)]
    return jnp.concatenate(each, axis=1)


def _at(features: Float[Array, "B T D"], position: Int[Array, "B"]) -> Float[Array, "B D"]:
    """Each row's feature at its own position; below 0, the first."""
    positions = jnp.maximum(position, 0)[:, None, None]
    return jnp.take_along_axis(features, positions, axis=1)[:, 0]
