"""Masks: which slots of a round's window its tokens attend to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def causal(rows: Int[Array, "T"], slots: int) -> jax.Array:
    """[1, T, W]: which window slots the tokens in slots `rows` see, if each sees those before."""
    return (jnp.arange(slots)[None, :] <= rows[:, None])[None]
