"""Masks of attention: the slots of a round's window that each token attends to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def causal(rows: Int[Array, "T"], slots: int) -> jax.Array:
    """Return the causal mask [1, T, W] of the tokens in slots `rows`, over W = `slots` slots."""
    return (jnp.arange(slots)[None, :] <= rows[:, None])[None]
