"""Placement of arrays on a mesh of devices, by two mesh axes and a table of logical axis names.

Rows of a batch are sharded over `data`. Weights, caches and logits are sharded over `model` along
heads, MLP width and vocabulary (tensor parallelism: Shoeybi et al. 1909.08053) and along experts
(Lepikhin et al. 2006.16668); everything else is replicated. The axes are Auto: XLA's partitioner
follows the placement of parameters and the few constraints set by models and decoding loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.errors import InputError, shown

DATA, MODEL = "data", "model"
LOGICAL_AXES = {
    "batch": DATA,
    "heads": MODEL,
    "kv_heads": MODEL,
    "experts": MODEL,
    "mlp": MODEL,
    "vocab": MODEL,
}
"""The mesh axis over which each logical axis is sharded; other logical axes are not."""

Axes = Sequence[str | None]
Placement = Mesh | jax.Device | None
"""A mesh, one device, or JAX's default device."""


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of `data` x `model` devices, by default made of all devices.

    Raises InputError if the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    for name, size in (("data", data), ("model", model)):
        if not isinstance(size, int) or size < 1:
            raise InputError(f"mesh.{name}={shown(size)}: use a whole number from 1 to {1 << 20}")
    if data * model != len(devices):
        raise InputError(
            f"mesh.data={data}, mesh.model={model}: {data * model} devices are requested and "
            f"{len(devices)} available; make data x model = {len(devices)}"
        )
    return jax.make_mesh(
        (data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def axis_size(mesh: Mesh | None, name: str) -> int:
    """Return the number of devices along an axis; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[name]


def placement_of(tree: Any, mesh: Mesh | None) -> Placement:
    """Return `mesh`, or without one the device that holds all arrays of `tree`.

    Returns None if there is no mesh and the arrays share no device.
    """
    devices = {
        device
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        for device in leaf.devices()
    }
    return mesh if mesh is not None or len(devices) != 1 else devices.pop()


def first_device(where: Placement) -> jax.Device:
    """Return one device of a placement; without a placement, JAX's default device."""
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    return jax.devices()[0] if device is None else device


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Return a context in which programs are traced for a mesh; a no-op without a mesh."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def partition(
    axes: Axes, shape: Sequence[int], mesh: Any, blocks: int | None = None
) -> PartitionSpec:
    """Return how an array of the given shape, with the logical `axes`, is sharded over `mesh`.

    An axis whose size, or number of `blocks` that must stay whole, is not a multiple of the number
    of devices is not sharded. If several logical axes map to one mesh axis, as for experts and
    their width, the first that can be sharded is.
    """
    split: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        axis = LOGICAL_AXES.get(name) if name else None
        fits = axis is not None and axis not in split and (blocks or size) % mesh.shape[axis] == 0
        split.append(axis if fits else None)
    return PartitionSpec(*split)


def num_parts(axis: str, size: int) -> int:
    """Return into how many shards an array's axis of `size` elements is divided.

    `axis` is its logical name; the mesh is that for which a program is being traced. The result is
    1 without a mesh, and for an axis that `partition` would not shard.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    (split,) = partition((axis,), (size,), mesh)
    return 1 if split is None else mesh.shape[split]


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Return `x` with a sharding constraint: one logical axis, or None, for each of its axes.

    Without a mesh it is unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def constrain_rows(tree: Any) -> Any:
    """Return a tree of arrays, constrained to have their first axis sharded over `data`."""

    def rows(leaf: jax.Array) -> jax.Array:
        return constrain(leaf, "batch", *[None] * (leaf.ndim - 1)) if leaf.ndim else leaf

    return jax.tree.map(rows, tree)


def place(array: np.ndarray, axes: Axes, where: Placement) -> jax.Array:
    """Return a host array as a device array sharded by its logical axes.

    With several processes, each of them must call it.
    """
    if not isinstance(where, Mesh):
        return jax.device_put(array, where)
    sharding = NamedSharding(where, partition(axes, array.shape, where))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_rows(array: np.ndarray, where: Placement) -> jax.Array:
    """Return a host array as a device array whose first axis, the batch, is sharded over `data`."""
    return place(array, ("batch", *[None] * (array.ndim - 1)), where)


def place_keys(keys: Sequence[jax.Array], where: Placement) -> jax.Array:
    """Return a batch's keys, one per row, as one device array sharded over `data`."""
    if not isinstance(where, Mesh):
        return jax.device_put(jax.numpy.stack(list(keys)), where)
    data = place_rows(np.stack([np.asarray(jax.random.key_data(key)) for key in keys]), where)
    rows = NamedSharding(where, partition(["batch"], data.shape[:1], where))
    return jax.jit(jax.random.wrap_key_data, out_shardings=rows)(data)


def fetch(tree: Any) -> Any:
    """Return a tree of device arrays as NumPy arrays.

    With several processes, each of them must call it, in the same order.
    """
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return jax.tree.map(np.asarray, tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def spread(tree: Any, where: Placement) -> Any:
    """Return `tree` with all arrays on the devices of a placement.

    Arrays that have to be moved are replicated over a mesh.
    """
    if where is None:
        return tree
    devices, replicated = {where}, where
    if isinstance(where, Mesh):
        devices, replicated = set(where.devices.flat), NamedSharding(where, PartitionSpec())

    def move(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            return leaf
        return jax.device_put(leaf, replicated)

    return jax.tree.map(move, tree)
