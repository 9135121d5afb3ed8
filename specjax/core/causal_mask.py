"""The causal mask of attention within a round's window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def causal(rows: Int[Array, "T"], slots: int) -> jax.Array:
    """Return the mask [1, T, W], true where a token attends: at its own slot and earlier ones.

    `rows` are the window slots of the T tokens, and W = `slots` is the size of the window.
    """
    return (jnp.arange(slots)[None, :] <= rows[:, None])[None]
