"""Drawing the tokens of sibling nodes of a tree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.sampling.argument_checks import check_log_probabilities, one_key_per_row


def draw_siblings(
    key: Any, logq: Float[Array | np.ndarray, "*rows V"], count: int, *, replace: bool = False
) -> Int[Array, "*rows count"]:
    """Draw `count` tokens from each distribution, in the order in which rules test siblings.

    `key` is a typed JAX key, a legacy uint32 key or an integer seed. Tokens are drawn without
    replacement, as `verify_tree` expects, or independently if `replace` is set. If fewer than
    `count` tokens of a distribution have positive probability, they come first, and the others,
    whose probability is 0, are never accepted by `rejection`. Raises ValueError for an invalid key,
    for values that are not log-probabilities, and for a `count` outside 1 to V.
    """
    logq = jnp.asarray(logq)
    if not logq.ndim:
        raise ValueError("logq is one number: pass log-probabilities [V], or [..., V]")
    check_log_probabilities("logq", logq)
    vocab = logq.shape[-1]
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 < count <= vocab:
        raise ValueError(f"count={count!r}: use a whole number from 1 to V = {vocab}")
    # One key suffices for all rows: JAX draws different noise for each of them.
    key = one_key_per_row(key, 1)[0]
    shape = (count, *logq.shape[:-1])
    drawn = jax.random.categorical(key, logq, shape=shape, replace=replace, mode="high")
    return jnp.moveaxis(drawn, 0, -1).astype(jnp.int32)
