"""Compare a GPU's or a TPU's kernel for attention with float32 on the CPU.

Prints one line for each case; the exit code is 1 if an error exceeds the dtype's rounding.
"""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.cache import KVCache, Window
from specjax.core.cached_entries import encode
from specjax.models.kernels import attention_kernel, tpu_attention
from specjax.models.layers.attention import attend, attend_cache, cached_blocks

_CAPACITY = 512
_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 1e-4}


def main() -> int:
    """Compare every case; return the exit code."""
    failed = False
    for dtype, queries, slots, sliding in itertools.product(_LIMITS, (4, 150), (5, 70), (0, 1)):
        softcap = 5.0 if sliding else None
        operands = _operands(dtype, queries, slots, sliding=bool(sliding))
        output = np.asarray(_attention(operands, softcap), np.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            reference = np.asarray(_reference(operands, softcap))
        error = float(np.abs(output - reference).max())
        bad = not error <= _LIMITS[dtype]
        failed |= bad
        print(
            f"{dtype}, {queries} queries, window of {slots}{', sliding, soft cap' * sliding}: "
            f"error {error:.1e}{' is too large' * bad}"
        )
    return int(failed)


class _Operands(NamedTuple):
    """The arguments of attention: queries [B, G, X, C], cache, window, and what queries may see.

    `visible` [B, 1, X, W] masks the window. `oldest` [B, X] is the first position of the cache that
    each query sees, or None for all.
    """

    query: jax.Array
    cache: KVCache
    window: Window
    visible: jax.Array
    oldest: jax.Array | None


def _operands(dtype: str, queries: int, slots: int, *, sliding: bool) -> _Operands:
    """Return random operands, whose cache has rows from empty to full."""
    rng = np.random.default_rng(0)
    layers, batch, heads, width = 2, 4, 2, 64
    wide = jnp.float32 if dtype == "int8" else jnp.dtype(dtype)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(wide)

    size = (layers, batch, heads, _CAPACITY, width)
    keys, values = (encode(normal(*size), jnp.dtype(dtype)) for _ in range(2))
    lengths = jnp.array([0, 1, 300, _CAPACITY], jnp.int32)
    window = Window(*(normal(layers, batch, heads, slots, width) for _ in range(2)))
    visible = rng.random((batch, 1, queries, slots)) < 0.5
    visible[..., 0] = True
    oldest = lengths[:, None] - jnp.asarray(rng.integers(0, 90, (batch, queries)), jnp.int32)
    query = normal(batch, heads, queries, width) / 8
    cache = KVCache(keys, values, lengths)
    return _Operands(query, cache, window, jnp.asarray(visible), oldest if sliding else None)


@jax.jit(static_argnums=1)
def _attention(operands: _Operands, softcap: float | None) -> jax.Array:
    """Return the attention in layer 1 by the device's kernel."""
    query, cache, window, visible, oldest = operands
    if jax.default_backend() == "tpu":
        start = attend(query, window.k[1], window.v[1], visible, softcap)
        mixed = tpu_attention.attend_committed(query, cache, 1, start, oldest, softcap)
    else:
        mixed = attention_kernel.attend_window_and_cache(
            query, cache, window, 1, visible, oldest, softcap
        )
    return mixed.weighted / mixed.denominator


def _reference(operands: _Operands, softcap: float | None) -> jax.Array:
    """Return attention in layer 1 with float32 queries and window, on the CPU."""
    query, cache, window, visible, oldest = jax.device_put(operands, jax.devices("cpu")[0])
    query, window = jax.tree.map(lambda array: array.astype(jnp.float32), (query, window))
    start = attend(query, window.k[1], window.v[1], visible, softcap)
    mixed = attend_cache(query, cache, 1, start, cached_blocks(cache), oldest, softcap)
    return mixed.weighted / mixed.denominator


if __name__ == "__main__":
    sys.exit(main())
