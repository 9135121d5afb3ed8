"""The dtype of matrix products in training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.fields import Choice

MULTIPLY = Choice(("auto", "float32", "bfloat16"))
"""The names of dtypes for matrix products."""


def multiply_dtype(name: str, field: str = "dtype") -> np.dtype | None:
    """Return the dtype of products for "auto", "float32" (None) or "bfloat16".

    "auto" is bfloat16 if the device multiplies it in hardware: accelerators, and CPUs with AMX or
    AVX-512's bfloat16 instructions. Raises InputError, naming `field`, for other names.
    """
    if MULTIPLY.check(field, name) == "auto":
        name = "bfloat16" if jax.default_backend() != "cpu" or _cpu_has_bfloat16() else "float32"
    return np.dtype(jnp.bfloat16) if name == "bfloat16" else None


def as_multiplied(params: Any, multiply: np.dtype | None) -> Any:
    """Return a frozen decoder's parameters with layer kernels rounded once to the dtype `multiply`.

    Otherwise they would be rounded at each product. Routers are excluded, since their products are
    not rounded.
    """
    if multiply is None:
        return params

    def rounded(path: Any, leaf: jax.Array) -> jax.Array:
        names = {step.key for step in path}
        return leaf.astype(multiply) if path[-1].key == "kernel" and "router" not in names else leaf

    runs = {name: params[name] for name in ("dense_layers", "layers") if name in params}
    return {**params, **jax.tree_util.tree_map_with_path(rounded, runs)}


def _cpu_has_bfloat16() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return not {"amx_bf16", "avx512_bf16"}.isdisjoint(file.read().split())
    except OSError:
        return False
