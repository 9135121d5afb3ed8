"""Nested tables of parameters: shapes, logical axes and initializers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from specjax.errors import InputError
from specjax.models.layers.quantized import QuantizedKernel


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape, the logical name of each axis, and the kind of its initial values.

    `always` is a dtype that overrides the model's. A mesh shards an axis only between `blocks`
    equal blocks, such as heads, if that is not None.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kind: str = "normal"
    always: str | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    def dtype(self, of_model: Any) -> np.dtype:
        """Return the dtype of the parameter in a model whose dtype is `of_model`."""
        return np.dtype(of_model if self.always is None else self.always)

    def with_layers(self, count: int) -> Parameter:
        """Return the parameter stacked over `count` layers."""
        return replace(self, shape=(count, *self.shape), axes=("layers", *self.axes))

    def initializer(self) -> nn.initializers.Initializer:
        """Return the Flax initializer of this kind, which boxes the value with its axes' names.

        `normal` has standard deviation 0.02.
        """
        start = {
            "normal": nn.initializers.normal(0.02),
            "ones": nn.initializers.ones_init(),
            "zeros": nn.initializers.zeros_init(),
            "identity": _identity,
            "first_tap": _first_tap,
        }[self.kind]
        return nn.with_logical_partitioning(start, self.axes)


def _identity(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return an array whose last two axes are identity matrices."""
    del key
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)


def _first_tap(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return convolution kernels [..., taps, channels] that pass their input through."""
    del key
    return jnp.zeros(shape, dtype).at[..., 0, :].set(1)


class ParameterTable(nn.Module):
    """A Flax module that declares every entry of a nested table, for Flax to initialize."""

    table: Mapping[str, Parameter | Mapping]
    dtype: jnp.dtype

    @nn.compact
    def __call__(self) -> dict[str, jax.Array | dict]:
        """Return the parameters as a plain nested dict."""
        return {
            name: self.param(name, entry.initializer(), entry.shape, entry.dtype(self.dtype))
            if isinstance(entry, Parameter)
            else ParameterTable(entry, self.dtype, name=name)()
            for name, entry in self.table.items()
        }


def checked(table: Mapping[str, Any], params: Any, path: str = "params") -> dict[str, Any]:
    """Return the parameters that `table` lists as a plain nested dict, without boxes of axis names.

    `path` is the name of the tree in messages. Raises InputError for a parameter that is missing or
    has the wrong shape.
    """
    values = {}
    for name, entry in table.items():
        where = f"{path}.{name}"
        if name not in params:
            raise InputError(f"{where} is missing")
        value = params[name]
        if isinstance(entry, Parameter):
            value = nn.meta.unbox(value)
            # A quantized table has the rows of embeddings as outputs.
            as_kernel = isinstance(value, QuantizedKernel) and name == "embedding"
            shape = value.shape[::-1] if as_kernel else value.shape
            if shape != entry.shape:
                raise InputError(f"{where} has the shape {shape}; it has to be {entry.shape}")
            values[name] = value
        else:
            values[name] = checked(entry, value, where)
    return values


def cast(params: Any, table: Any, dtype: Any) -> Any:
    """Return a nested table of arrays in the dtypes that they have in a model of dtype `dtype`."""
    return jax.tree.map(lambda entry, leaf: jnp.asarray(leaf, entry.dtype(dtype)), table, params)
