"""A mixture of experts on a mesh, with one sum over the devices that share the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from specjax.distributed.sharding import MODEL, partition
from specjax.models.layers.experts import Routes, StackedExperts
from specjax.models.layers.quantized import QuantizedKernel
from specjax.models.parameter_table import DOWN_AXES, UP_AXES, UP_BIAS_AXES

Mix = Callable[..., Float[Array, "N D"]]
"""`experts.mix` with all arguments but (h, routes, stacked, shared=) bound."""


def mix_on_mesh(
    mix: Mix,
    h: Float[Array, "N D"],
    routes: Routes,
    stacked: StackedExperts,
    shared: dict[str, Any] | None,
    shards: int,
) -> Float[Array, "N D"]:
    """Return the result of `mix`, in the dtype of `h`, in a program for a mesh or for one device.

    `routes`, `stacked` and `shared` are arguments of `mix`. Rows are sharded over `data`. `shards`
    is the number of devices along `model` over which the kernels are sharded: each device mixes its
    own experts, or its part of each expert's width, and the results are summed once. XLA's
    partitioner would sum after each product in the loop over experts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return mix(h, routes, stacked, shared=shared).astype(h.dtype)

    def split(kernel: jax.Array | QuantizedKernel, axes: tuple[str, ...]) -> list[PartitionSpec]:
        """Return the partition of each array of a kernel whose axes have these logical names."""
        if shards == 1:
            return [PartitionSpec()] * len(jax.tree.leaves(kernel))
        stacked_axes = ("layers",) * (kernel.ndim - len(axes))
        spec = partition((*stacked_axes, *axes), kernel.shape, mesh)
        return kernel.partitions(spec) if isinstance(kernel, QuantizedKernel) else [spec]

    rows = partition(("batch", None), h.shape, mesh)
    up, down = split(stacked.gate_up, UP_AXES), split(stacked.down, DOWN_AXES)
    by_expert = shards > 1 and len(up[0]) > 1 and up[0][1] is not None
    of_shared = [
        spec
        for name, weights in sorted((shared or {}).items())
        for spec in split(weights["kernel"], DOWN_AXES[1:] if name == "down" else UP_AXES[1:])
    ]
    bias = stacked.gate_up_bias
    of_bias = [] if bias is None else split(bias, UP_BIAS_AXES)
    # Quantised kernels are several arrays, each with a partition of its own.
    kernels, structure = jax.tree.flatten((stacked.down, stacked.gate_up, bias, shared))

    def on_device(h: jax.Array, routes: Routes, layer: jax.Array, *arrays: jax.Array) -> jax.Array:
        down, gate_up, bias, shared = jax.tree.unflatten(structure, arrays)
        if by_expert:
            first = lax.axis_index(MODEL) * down.shape[1]
            routes = routes._replace(experts=routes.experts - first)
        total = mix(h, routes, StackedExperts(gate_up, down, layer, bias), shared=shared)
        return lax.psum(total, MODEL) if shards > 1 else total

    of_routes = Routes(rows, rows, None if routes.shared is None else rows)
    specs = (rows, of_routes, PartitionSpec(), *down, *up, *of_bias, *of_shared)
    total = jax.shard_map(on_device, in_specs=specs, out_specs=rows, check_vma=False)(
        h, routes, jnp.asarray(stacked.layer), *kernels
    )
    return total.astype(h.dtype)
