"""Building of a parameter tree on the devices from a file's tensors, one at a time."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading.formats import parameter_names, tensor_layout
from specjax.loading.model import array_table
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig
from specjax.models.joined_kernels import Section
from specjax.models.layers.quantized import QuantizedKernel
from specjax.models.parameter_table import parameter_table

Read = Callable[[parameter_names.Location, slice, slice], Any]
"""A function (location, rows, inputs) that returns the slice `[rows, inputs]` of a tensor.

The values are in the layout of the tree (`tensor_layout.from_stored`), as an array, or as a
QuantizedKernel if the file's blocks are kept. If rows are reordered, `rows` are those of whole
heads.
"""

_THREADS = 2
_CHUNK_BYTES = 1 << 21
"""The number of bytes that a host thread reads at a time, which fit into the core's cache."""
_PADDING = 24
"""Elements of padding per row; rows a power of two apart would evict each other from the cache."""


def can_split(config: DecoderConfig, shards: int) -> bool:
    """Return whether a decoder's heads, MLPs and experts can be sharded over `shards` devices."""
    heads, kv_heads, experts = config.num_heads, config.num_kv_heads, config.experts
    grouped = kv_heads % shards == 0 or shards % kv_heads == 0
    if heads % shards or not grouped or any(size % shards for size in _widths(config)):
        return False
    if experts is None:
        return True
    return experts.num_experts % shards == 0 or experts.intermediate_size % shards == 0


def _widths(config: DecoderConfig) -> list[int]:
    """Return the widths of a decoder's dense MLPs, including the MLP that experts share."""
    if config.experts is None:
        return [config.intermediate_size]
    widths = {config.experts.shared_size} - {0}
    return sorted(widths | ({config.intermediate_size} if config.experts.num_dense else set()))


def check_shards(config: DecoderConfig, shards: int) -> None:
    """Raise InputError unless heads, MLPs and experts can be sharded over `shards` devices."""
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


class _Slot(NamedTuple):
    """A leaf of the tree in one layer and for one expert, as a unit of reading.

    `path` is that of the leaf, `index` selects layer and expert on its first axes, and `locations`
    are the tensors in the file that fill it.
    """

    path: parameter_names.Path
    index: tuple[int, ...]
    locations: tuple[parameter_names.Location, ...]

    @property
    def is_kernel(self) -> bool:
        """Whether the slot is a kernel [in, out], the transpose of its rows."""
        return self.locations[0].is_kernel

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the slot's rows: [out, in] for a kernel."""
        shape = self.locations[0].leaf_shape
        return shape[::-1] if self.is_kernel else shape

    @property
    def block(self) -> int:
        """The number of rows per block; each block has a section of every location."""
        return self.locations[0].section.size

    def fill(self, target: Any, read: Read, first: int, inputs: slice = slice(None)) -> None:
        """Write the slot's rows, from `first` on, into `target`, in the columns `inputs`.

        `target` is a host array of rows, or a QuantizedKernel of them; `first` and its number of
        rows are multiples of `block`.
        """
        for location in self.locations:
            section = location.section
            start = first // self.block * section.width

            def write(target: np.ndarray, rows: np.ndarray, section: Section = section) -> None:
                section_rows = section.of(target)
                np.copyto(section_rows, rows.reshape(section_rows.shape), casting="unsafe")

            count = len(jax.tree.leaves(target)[0]) // self.block * section.width
            jax.tree.map(write, target, read(location, slice(start, start + count), inputs))


def _slots(locations: Iterable[parameter_names.Location], scan_layers: bool) -> list[_Slot]:
    """Return the slots that `locations` fill, each at the position of its first location."""
    locations_of: dict[Any, list[parameter_names.Location]] = {}
    for location in locations:
        locations_of.setdefault(location.within(scan_layers), []).append(location)
    return [_Slot(*leaf, tuple(filling)) for leaf, filling in locations_of.items()]


def build(
    config: DecoderConfig,
    mtp: MtpConfig | None,
    dtype: np.dtype,
    locations: Iterable[parameter_names.Location],
    read: Read,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    threads: int = _THREADS,
    bits: Mapping[parameter_names.Path, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the filled tree of `array_table`, on the default device or sharded over a mesh.

    `read` returns rows of a location. Kernels are moved to the devices as rows [out, in], as in
    files, and transposed there; each process reads only the parts of its devices. The host holds
    one or two slots at a time, unless the device is a CPU without a mesh: then the tree is filled
    in host memory directly. `threads` threads read concurrently. Kernels at the paths in `bits`
    become quantized ones of 4 or 8 bits, on a CPU without a mesh only. Raises InputError if the
    mesh does not fit the model.
    """
    table, slots = array_table(config, mtp, scan_layers), _slots(locations, scan_layers)
    if mesh is not None:
        check_shards(config, shards)
        targets = table_shardings(table, mesh, shards)
    elif jax.default_backend() == "cpu":
        # device_put adopts aligned host arrays on CPU, where jnp.asarray copies half a gigabyte.
        return jax.device_put(_on_host(table, dtype, slots, read, threads, bits))
    else:
        device = SingleDeviceSharding(jax.devices()[0])
        targets = jax.tree.map(lambda _: device, table)

    def zeros() -> dict[str, Any]:
        return jax.tree.map(lambda entry: jnp.zeros(entry.shape, entry.dtype(dtype)), table)

    # One program for all parameters.
    params: dict[str, Any] = jax.jit(zeros, out_shardings=targets)()

    def read_slot(slot: _Slot) -> tuple[_Slot, Sharding, dict[Any, np.ndarray]]:
        leaf, entry = (parameter_names.lookup(tree, slot.path) for tree in (targets, table))
        target = _of_rows(leaf, len(slot.index), slot.is_kernel)
        parts = target.addressable_devices_indices_map(slot.rows).values()
        distinct = {_ranges(part): part for part in parts}
        of_dtype = entry.dtype(dtype)
        rows = {key: _read_part(slot, part, of_dtype, read) for key, part in distinct.items()}
        return slot, target, rows

    for slot, target, rows in _read_ahead(slots, read_slot, threads):
        *parents, last = slot.path
        node = parameter_names.lookup(params, tuple(parents))
        set_part = _setter(node[last].sharding, slot.is_kernel)
        node[last] = set_part(node[last], np.array(slot.index, np.int32), _put(slot, target, rows))
    return params


def _put(slot: _Slot, target: Sharding, rows: dict[Any, np.ndarray]) -> jax.Array:
    """Return a slot's rows as a device array, from the parts that this process has read."""
    return jax.make_array_from_callback(slot.rows, target, lambda part: rows[_ranges(part)])


def _ranges(part: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((axis.start, axis.stop) for axis in part)


def _read_part(slot: _Slot, part: tuple[slice, ...], dtype: Any, read: Read) -> np.ndarray:
    """Return the part of a slot's rows that one device holds, in `dtype`."""
    first, stop, _ = part[0].indices(slot.rows[0])
    # Whole blocks are read: a little more if there are more devices than key/value heads.
    begin, end = first // slot.block * slot.block, -(-stop // slot.block) * slot.block
    sizes = zip(part[1:], slot.rows[1:], strict=True)
    rows = np.empty((end - begin, *(len(range(size)[axis]) for axis, size in sizes)), dtype)
    slot.fill(rows, read, begin, *part[1:])
    return rows[first - begin : stop - begin]


def _of_rows(leaf: Sharding, axes: int, is_kernel: bool) -> Sharding:
    """Return the sharding of a slot's rows, given that of the leaf.

    `axes` is the number of the leaf's leading axes that a slot indexes.
    """
    if not isinstance(leaf, NamedSharding):
        return leaf
    split = leaf.spec[axes:]
    # Axes that a spec omits are not sharded.
    return NamedSharding(leaf.mesh, PartitionSpec(*(split[::-1] if is_kernel else split)))


def stored_tree(
    locations: Iterable[parameter_names.Location], tensors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return a tree of host arrays filled from `tensors` in memory, in the tensors' dtypes."""

    def read(location: parameter_names.Location, rows: slice, inputs: slice) -> np.ndarray:
        index = tensor_layout.own_rows(location, rows, inputs)
        return tensor_layout.from_stored(tensors[location.name][index], location)

    params: dict[str, Any] = {}
    for slot in _slots(locations, scan_layers=True):
        rows = np.empty(slot.rows, tensors[slot.locations[0].name].dtype)
        slot.fill(rows, read, 0)
        *parents, last = slot.path
        node = functools.reduce(lambda node, name: node.setdefault(name, {}), parents, params)
        node[last] = rows.T if slot.is_kernel else rows
    return params


def _on_host(
    table: dict[str, Any],
    dtype: Any,
    slots: Sequence[_Slot],
    read: Read,
    threads: int,
    bits: Mapping[parameter_names.Path, int],
) -> dict[str, Any]:
    """Return the tree of `table` in host memory, filled in chunks of rows.

    The arguments are those of `build`; `dtype` is the model's.
    """
    params = parameter_names.allocate(table, dtype)
    for slot in slots:
        if slot.path in bits:
            *parents, last = slot.path
            node = parameter_names.lookup(params, tuple(parents))
            if not isinstance(node[last], QuantizedKernel):
                lead = node[last].shape[: len(slot.index)]
                node[last] = parameter_names.empty_quantized((*lead, *slot.rows), bits[slot.path])

    def write(chunk: tuple[_Slot, int, int]) -> None:
        slot, first, stop = chunk
        leaf = parameter_names.lookup(params, slot.path)
        target = jax.tree.map(lambda array: array[slot.index], leaf)
        if isinstance(leaf, QuantizedKernel) or not slot.is_kernel:
            slot.fill(jax.tree.map(lambda rows: rows[first:stop], target), read, first)
            return
        width = slot.rows[1]
        rows = np.empty((stop - first, width + _PADDING), target.dtype)[:, :width]
        slot.fill(rows, read, first)
        target[:, first:stop] = rows.T

    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(write, (chunk for slot in slots for chunk in _chunks(slot, slot.path in bits)))
        )
    return params


def _chunks(slot: _Slot, whole: bool) -> Iterator[tuple[_Slot, int, int]]:
    """Yield (slot, first, stop) for chunks of a slot's rows: whole blocks of about `_CHUNK_BYTES`.

    Sizes count float32. If `whole`, yield a single chunk of all rows: quantized kernels, which are
    not transposed, need no smaller ones.
    """
    count, *rest = slot.rows
    step = (
        count if whole else max(1, _CHUNK_BYTES // (4 * math.prod(rest) * slot.block)) * slot.block
    )
    for first in range(0, count, step):
        yield slot, first, min(first + step, count)


Item, Result = TypeVar("Item"), TypeVar("Result")


def _read_ahead(
    items: Iterable[Item], read: Callable[[Item], Result], threads: int
) -> Iterator[Result]:
    """Yield `read(item)` for each item in order, with `threads` items being read at any time."""
    waiting = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        reading = collections.deque(
            pool.submit(read, item) for item in itertools.islice(waiting, threads)
        )
        while reading:
            yield reading.popleft().result()
            reading.extend(pool.submit(read, item) for item in itertools.islice(waiting, 1))


@functools.cache
def _setter(target: Sharding, is_kernel: bool) -> Callable[..., jax.Array]:
    """Return a compiled function (leaf, index, rows) that writes rows into a leaf at an index."""

    def put(leaf: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
        values = rows.T if is_kernel else rows
        lead = [index[axis] for axis in range(index.shape[0])]
        start = (*lead, *[0] * values.ndim)
        values = values.reshape((1,) * len(lead) + values.shape)
        return lax.dynamic_update_slice(leaf, values, start)

    return jax.jit(put, donate_argnums=0, out_shardings=target)
