"""No drafts: plain decoding in the same loop, what every speed-up is measured against."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax import trees
from specjax.drafters.base import Context, Drafter, Noise, stateless, unmoved
from specjax.trees import Draft


def make() -> Drafter:
    """The drafter that proposes nothing; every round emits one token."""
    return Drafter("none", stateless, _propose, unmoved, num_speculative_tokens=0)


def _propose(params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
    del params, noise
    batch = context.length.shape[0]
    nothing = jnp.zeros((batch, context.num_tokens), jnp.int32)
    return trees.chain(nothing, jnp.zeros(batch, jnp.int32)), state
