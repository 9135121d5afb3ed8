"""Compare the GPU kernel for attention with float32 on the CPU.

One line for each case; exit code 1 if an error exceeds what the dtype's rounding explains.
"""

from __future__ import annotations

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache, Window
from specjax.cached_entries import encode
from specjax.models.kernels.attention_kernel import attend_window_and_cache
from specjax.models.layers.attention import attend, attend_whole_cache

_CAPACITY = 512
_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 1e-4}


def main() -> int:
    """Compare every case; return the exit code."""
    failed = False
    for dtype, queries, slots, sliding in itertools.product(_LIMITS, (4, 150), (5, 70), (0, 1)):
        softcap = 5.0 if sliding else None
        operands, oldest = _operands(dtype, queries, slots, bool(sliding))
        got = np.asarray(_attention(*operands, oldest, softcap), np.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            wanted = np.asarray(_reference(*operands, oldest, softcap))
        error = float(np.abs(got - wanted).max())
        bad = not error <= _LIMITS[dtype]
        failed |= bad
        print(
            f"{dtype}, {queries} queries, window of {slots}{', sliding, soft cap' * sliding}: "
            f"error {error:.1e}{' is too large' * bad}"
        )
    return int(failed)


def _operands(
    dtype: str, queries: int, slots: int, sliding: bool
) -> tuple[tuple[jax.Array, KVCache, Window, jax.Array], jax.Array | None]:
    """Return random queries, a cache with rows of every filling, a window, its mask and limits."""
    rng = np.random.default_rng(0)
    layers, batch, heads, width = 2, 4, 2, 64
    wide = jnp.float32 if dtype == "int8" else jnp.dtype(dtype)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(wide)

    size = (layers, batch, heads, _CAPACITY, width)
    keys, values = (encode(normal(*size), jnp.dtype(dtype)) for _ in range(2))
    lengths = jnp.array([0, 1, 300, _CAPACITY], jnp.int32)
    window = Window(*(normal(layers, batch, heads, slots, width) for _ in range(2)))
    seen = rng.random((batch, 1, queries, slots)) < 0.5
    seen[..., 0] = True
    oldest = lengths[:, None] - jnp.asarray(rng.integers(0, 90, (batch, queries)), jnp.int32)
    query = normal(batch, heads, queries, width) / 8
    cache = KVCache(keys, values, lengths)
    return (query, cache, window, jnp.asarray(seen)), oldest if sliding else None


@jax.jit(static_argnums=5)
def _attention(
    query: jax.Array,
    cache: KVCache,
    window: Window,
    seen: jax.Array,
    oldest: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    mixed = attend_window_and_cache(query, cache, window, 1, seen, oldest, softcap)
    return mixed.weighted / mixed.denominator


def _reference(
    query: jax.Array,
    cache: KVCache,
    window: Window,
    seen: jax.Array,
    oldest: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    query, cache, window, seen, oldest = jax.device_put(
        (query, cache, window, seen, oldest), jax.devices("cpu")[0]
    )
    query, window = jax.tree.map(lambda array: array.astype(jnp.float32), (query, window))
    start = attend(query, window.k[1], window.v[1], seen, softcap)
    mixed = attend_whole_cache(query, cache, 1, start, oldest, softcap)
    return mixed.weighted / mixed.denominator


if __name__ == "__main__":
    sys.exit(main())
