"""Branches that update caches in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

Tree = TypeVar("Tree")


def apply_if(condition: Bool[Array, ""], run: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Return `run(tree)` under a condition, else `tree`; arrays are updated in place.

    XLA updates an array in place in a loop, but copies one that a branch returns. It has no
    gradient.
    """

    def once(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.zeros_like(condition), run(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (condition, tree))[1]
