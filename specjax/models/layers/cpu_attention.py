"""Attention over the cache and the window by a C++ kernel for CPUs (`models/cpu`).

The kernel reads each row's committed keys in place, in one call instead of some twenty XLA kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.models.cpu import library
from specjax.models.layers.attention import Partial

_LANES = 8
_BLOCK = 64
"""The number of keys that the kernel reads at a time, from one page."""


def attends(cache: KVCache, tokens: int) -> bool:
    """Return whether the kernel is available and supports T `tokens` per row with this cache."""
    several_pages = cache.pages is not None and cache.pages.shape[1] > 1
    return (
        not (several_pages and cache.k.shape[3] % _BLOCK)
        and cache.k.dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
        and cache.k.shape[-1] % _LANES == 0
        and library.is_for(tokens, jnp.dtype(jnp.float32))
    )


def attend_window_and_cache(
    query: Float[Array, "B G X C"],
    cache: KVCache,
    window: Window,
    layer: Int[Array, ""] | int,
    seen: Bool[Array, "#B 1 X W"],
    oldest: Int[Array, "B X"] | None = None,
    softcap: float | None = None,
    sinks: int = 0,
) -> Partial:
    """Return attention over one layer's committed keys and the keys of the window in `seen`.

    With `oldest`, each query attends to committed keys from that position on and to the first
    `sinks` keys. `softcap` limits scores to c tanh(score/c). The result is already divided by its
    denominator, whose logarithm is part of the peak.
    """
    batch, _, queries, width = query.shape
    call = jax.ffi.ffi_call(
        library.ATTENTION,
        tuple(jax.ShapeDtypeStruct((*query.shape[:3], size), jnp.float32) for size in (width, 1)),
        vmap_method="sequential",
    )
    if oldest is None:
        oldest = jnp.zeros((batch, queries), jnp.int32)
    (keys, *key_exponents), (values, *value_exponents) = map(jax.tree.leaves, (cache.k, cache.v))
    pages = jnp.arange(batch)[:, None] if cache.pages is None else cache.pages
    mixed, scores = call(
        query.astype(jnp.float32),
        jnp.asarray(layer, jnp.int32)[None],
        keys,
        values,
        pages.astype(jnp.int32),
        cache.length,
        window.k,
        window.v,
        jnp.broadcast_to(seen[:, 0], (batch, queries, window.k.shape[3])),
        oldest,
        *key_exponents,
        *value_exponents,
        softcap=np.float32(0 if softcap is None else softcap),
        sinks=np.int32(sinks),
    )
    return Partial(scores, jnp.ones_like(scores), mixed)
