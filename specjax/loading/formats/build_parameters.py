"""Build a parameter tree on the devices from a file's tensors, one at a time."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading.formats import parameter_names
from specjax.models.config import DecoderConfig
from specjax.models.layers.quantized import QuantizedKernel
from specjax.models.parameter_table import parameter_table

Fill = Callable[[parameter_names.Location, Any], None]
"""Writes one tensor's values into a host array of the tree's shape (`Location.shape`).

Into a QuantizedKernel of host arrays it writes the integers, scales and minimums of its rows.
"""

_THREADS = 2


def can_split(config: DecoderConfig, shards: int) -> bool:
    """Return whether a decoder's heads, MLP and experts can be sharded over `shards` devices."""
    heads, kv_heads, experts = config.num_heads, config.num_kv_heads, config.experts
    grouped = kv_heads % shards == 0 or shards % kv_heads == 0
    if heads % shards or not grouped or any(size % shards for size in _widths(config)):
        return False
    if experts is None:
        return True
    return experts.num_experts % shards == 0 or experts.intermediate_size % shards == 0


def _widths(config: DecoderConfig) -> list[int]:
    """Return the widths of a decoder's MLPs, those that its experts share included."""
    if config.experts is None:
        return [config.intermediate_size]
    widths = {config.experts.shared_size} - {0}
    return sorted(widths | ({config.intermediate_size} if config.experts.num_dense else set()))


def check_shards(config: DecoderConfig, shards: int) -> None:
    """Raise InputError unless heads, MLP and experts can be sharded over `shards` devices."""
    if can_split(config, shards):
        return
    parts = [f"{config.num_heads} heads, {config.num_kv_heads} key/value heads"]
    parts += [f"an MLP of {width}" for width in _widths(config)]
    if (experts := config.experts) is not None:
        parts.append(f"{experts.num_experts} experts of {experts.intermediate_size}")
    counts = range(1, config.num_heads + 1)
    good = [str(count) for count in counts if can_split(config, count)]
    raise InputError(
        f"mesh.model={shards}: {' and '.join(parts)} cannot be split over {shards} devices; "
        f"use {' or '.join(good)}"
    )


def parameter_shardings(
    config: DecoderConfig, mesh: Mesh, shards: int, scan_layers: bool = True
) -> dict[str, Any]:
    """Return the sharding of each parameter on a mesh: over `model`, or replicated."""
    return table_shardings(parameter_table(config, scan_layers), mesh, shards)


def table_shardings(table: dict[str, Any], mesh: Mesh, shards: int) -> dict[str, Any]:
    """Return the sharding of each entry of a nested dict of `Parameter`."""

    def sharded(entry: Any) -> NamedSharding:
        if shards == 1:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, sharding.partition(entry.axes, entry.shape, mesh))

    return jax.tree.map(sharded, table)


def build(
    config: DecoderConfig,
    dtype: np.dtype,
    locations: Sequence[parameter_names.Location],
    fill: Fill,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    threads: int = _THREADS,
    bits: Mapping[parameter_names.Path, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the parameter tree with every location filled, on the default device or on a mesh.

    The host holds one or two tensors at a time, unless the device is the CPU without a mesh: then
    the tree is filled in host memory directly. `threads` is the number of threads that fill
    concurrently; one thread fills the locations in order. Kernels at the paths of `bits` are
    quantized ones of 4 or 8 bits, on a CPU without a mesh only. Raises InputError if the mesh does
    not fit the model.
    """
    table = parameter_table(config, scan_layers)
    if mesh is not None:
        check_shards(config, shards)
        targets = parameter_shardings(config, mesh, shards, scan_layers)
    elif jax.default_backend() == "cpu":
        return _adopted(config, dtype, locations, fill, scan_layers, threads, bits)
    else:
        device = SingleDeviceSharding(jax.devices()[0])
        targets = jax.tree.map(lambda _: device, table)

    def zeros() -> dict[str, Any]:
        return jax.tree.map(lambda entry: jnp.zeros(entry.shape, entry.dtype(dtype)), table)

    # One program for all parameters.
    params: dict[str, Any] = jax.jit(zeros, out_shardings=targets)()
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, params)

    def read(location: parameter_names.Location) -> tuple[parameter_names.Location, np.ndarray]:
        path, _ = location.within(scan_layers)
        tensor = np.empty(location.shape, parameter_names.lookup(dtypes, path))
        fill(location, tensor)
        return location, tensor

    for location, tensor in _read_ahead(locations, read, threads):
        path, index = location.within(scan_layers)
        *parents, last = path
        node, target = params, parameter_names.lookup(targets, path)
        for key in parents:
            node = node[key]
        if not index:
            node[last] = _put(tensor, target)
        else:
            part = _put(tensor, _without(target, len(index)))
            node[last] = _set_part(node[last], np.array(index, np.int32), part)
    return params


def _without(stacked: Sharding, axes: int) -> Sharding:
    """Return the sharding of one part of a parameter, before it is stacked over its first axes."""
    if isinstance(stacked, NamedSharding):
        return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[axes:]))
    return stacked


def _adopted(
    config: DecoderConfig,
    dtype: np.dtype,
    locations: Sequence[parameter_names.Location],
    fill: Fill,
    scan_layers: bool,
    threads: int,
    bits: Mapping[parameter_names.Path, int],
) -> dict[str, Any]:
    params = parameter_names.allocate(config, dtype, scan_layers)
    for location in locations:
        path, index = location.within(scan_layers)
        if path in bits:
            *parents, last = path
            node = parameter_names.lookup(params, tuple(parents))
            if not isinstance(node[last], QuantizedKernel):
                lead = node[last].shape[: len(index)]
                node[last] = parameter_names.empty_quantized((*lead, *location.rows), bits[path])

    def write(location: parameter_names.Location) -> None:
        path, index = location.within(scan_layers)
        leaf = parameter_names.lookup(params, path)
        fill(location, jax.tree.map(lambda array: array[index], leaf))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, locations))
    # device_put adopts aligned host arrays on CPU, where jnp.asarray copies half a gigabyte.
    return jax.device_put(params)


_Read = Callable[[parameter_names.Location], tuple[parameter_names.Location, np.ndarray]]


def _read_ahead(
    locations: Sequence[parameter_names.Location], read: _Read, threads: int
) -> Iterator[tuple[parameter_names.Location, np.ndarray]]:
    """Yield each location with its tensor, in the same order on all processes."""
    waiting = iter(locations)
    with ThreadPoolExecutor(threads) as pool:
        reading = collections.deque(
            pool.submit(read, location) for location in itertools.islice(waiting, threads)
        )
        while reading:
            yield reading.popleft().result()
            reading.extend(pool.submit(read, location) for location in itertools.islice(waiting, 1))


def _put(tensor: np.ndarray, target: Sharding) -> jax.Array:
    return jax.make_array_from_callback(tensor.shape, target, lambda part: tensor[part])


@jax.jit(donate_argnums=0)
def _set_part(stacked: jax.Array, index: jax.Array, tensor: jax.Array) -> jax.Array:
    lead = [index[axis] for axis in range(index.shape[0])]
    where = (*lead, *[0] * tensor.ndim)
    return lax.dynamic_update_slice(stacked, tensor.reshape((1,) * len(lead) + tensor.shape), where)
