"""Parameters of heads in 8 bits, in which the included heads are stored.

Kernels and tables of embeddings are stored as `quantize` rounds them, integers in groups of 32 with
a scale each, but with scales in bfloat16; other parameters are in half precision. An integer of 8
bits times such a scale is exact in float32. So the integers and scales are found again where a
loaded head is quantized, and where it is stored once more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError
from specjax.loading.compare_arrays import compare_arrays, leaf_name
from specjax.loading.quantize import kernel_bits
from specjax.models.layers.quantized import GROUP, GroupedKernel, quantize
from specjax.models.parameters import Parameter

_REMEDY = "export the head again"


def compact_arrays(where: str, table: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return the float parameters that `table` describes as the arrays to be stored.

    They are NumPy's, and a quantized parameter is a dict of `values` and `scales`. Raises
    InputError, beginning with `where`, for a parameter with numbers that are not finite in half
    precision.
    """

    def stored(path: tuple[Any, ...], entry: Parameter, form: Any, leaf: Any) -> Any:
        del entry
        if not np.abs(leaf).max() <= jnp.finfo(jnp.float16).max:
            raise InputError(
                f"{where}: {leaf_name(path)} does not fit in half precision; train the head anew, "
                "at a lower learning_rate"
            )
        if not isinstance(form, dict):
            return np.asarray(leaf, np.float16)
        kernel = quantize(_as_kernel(path, jnp.asarray(leaf)), 8, scale_dtype=jnp.bfloat16)
        scales = np.asarray(kernel.scales, jnp.bfloat16)
        return {"values": np.asarray(kernel.values), "scales": scales}

    return _map(stored, table, _forms(table), params)


def float_params(table: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Return stored arrays as the parameters that `table` describes, NumPy's in float32.

    Raises InputError for arrays that `compact_arrays` does not make.
    """
    compare_arrays("compact", arrays, _forms(table), _REMEDY)

    def weights(path: tuple[Any, ...], entry: Parameter, stored: Any) -> np.ndarray:
        del entry
        if not isinstance(stored, dict):
            return np.asarray(stored, np.float32)
        values, scales = np.asarray(stored["values"]), np.asarray(stored["scales"], np.float32)
        return _as_kernel(path, GroupedKernel(values, scales, None).dequantized())

    return _map(weights, table, arrays)


def _forms(table: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes and dtypes of the arrays that are stored for each entry of a table."""
    kernels = kernel_bits(table, "int8")

    def form(path: tuple[Any, ...], entry: Parameter) -> Any:
        shape = entry.shape
        names = tuple(step.key for step in path)
        in_groups = names in kernels or (_is_embedding(path) and len(shape) > 1)
        rows = (*shape[:-2], *shape[:-3:-1]) if names in kernels else shape
        if not in_groups or rows[-1] % GROUP:
            return jax.ShapeDtypeStruct(shape, jnp.float16)
        return {
            "values": jax.ShapeDtypeStruct(rows, jnp.int8),
            "scales": jax.ShapeDtypeStruct((*rows[:-1], rows[-1] // GROUP), jnp.bfloat16),
        }

    return _map(form, table)


def _is_embedding(path: tuple[Any, ...]) -> bool:
    return path[-1].key == "embedding"


def _as_kernel(path: tuple[Any, ...], array: Any) -> Any:
    """Return a table of embeddings as a kernel with a row's numbers as inputs, or the reverse."""
    return array.swapaxes(-1, -2) if _is_embedding(path) else array


def _map(convert: Any, table: dict[str, Any], *trees: dict[str, Any]) -> Any:
    is_entry = lambda node: isinstance(node, Parameter)  # noqa: E731
    return jax.tree_util.tree_map_with_path(convert, table, *trees, is_leaf=is_entry)
