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
from specjax.files.log import share_logger
from specjax.loading.formats import parameter_names, tensor_layout
from specjax.loading.model import array_table
from specjax.models.config import DecoderConfig
from specjax.models.cpu import tiles
from specjax.models.layers.quantized import (
    QuantizedKernel,
    array_partitions,
    has_one_scale,
    quantize,
)
from specjax.models.layers.tiled_kernel import Layout, TiledKernel, empty_tiles
from specjax.models.mtp import MtpConfig
from specjax.models.parameter_table import parameter_table
from specjax.models.parameters import Parameter

Read = Callable[[parameter_names.Location, slice, slice], Any]
"""A function (location, rows, inputs) that returns the slice `[rows, inputs]` of a tensor.

The values are in the layout of the tree (`tensor_layout.from_stored`), or the file's blocks where
these are kept. If rows are reordered, `rows` are those of whole heads.
"""

_READING = "reading the parameters"
"""How lines of progress begin."""
_THREADS = 2
_PIECE_BYTES = 1 << 21
"""The number of bytes, in float32, that a host thread reads at a time, which fit into its cache."""
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
    """Return the sharding of each of a decoder's parameters on a mesh, as a nested dict.

    A parameter is sharded over `model`, or replicated if `shards`, the number of parts of the
    weights, is 1.
    """
    return table_shardings(parameter_table(config, scan_layers), mesh, shards)


def table_shardings(table: dict[str, Any], mesh: Mesh, shards: int) -> dict[str, Any]:
    """Return the sharding on a mesh of each `Parameter` in a nested dict, as a nested dict.

    All are replicated if `shards`, the number of parts of the weights, is 1.
    """

    def sharded(entry: Any) -> NamedSharding:
        if shards == 1:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, sharding.partition(entry.axes, entry.shape, mesh, entry.blocks))

    return jax.tree.map(sharded, table)


class _Piece(NamedTuple):
    """Some of a location's rows: those `within` its section, in some of the leaf's `blocks`."""

    location: parameter_names.Location
    blocks: slice
    within: slice

    @property
    def rows(self) -> slice:
        """The range of these rows among those of the location."""
        width = self.location.section.width
        first, stop = self.blocks.start * width, (self.blocks.stop - 1) * width
        return slice(first + self.within.start, stop + self.within.stop)

    def write(self, rows: np.ndarray, target: np.ndarray, first: int = 0) -> None:
        """Write the rows into those of the leaf from block `first` on, in the target's dtype."""
        blocks = slice(self.blocks.start - first, self.blocks.stop - first)
        part = self.location.section.of(target)[blocks, self.within]
        np.copyto(part, rows.reshape(part.shape), casting="unsafe")

    def write_tiles(self, rows: np.ndarray, target: TiledKernel, layer: int) -> None:
        """Write the rows, in blocks of a file, into those of a layer of a kernel in tiles.

        Raises InputError for scales that are not finite.
        """
        section, width = self.location.section, self.within.stop - self.within.start
        if section.width == section.size:
            parts = [(self.rows.start, rows)]
        else:
            firsts = range(self.blocks.start * section.size, section.size * self.blocks.stop)
            firsts = firsts[section.start + self.within.start :: section.size]
            parts = list(zip(firsts, np.split(rows, len(rows) // width), strict=True))
        if not all(target.write(layer, *part) for part in parts):
            raise InputError(
                f"the tensor {self.location.name} has scales that are not finite; download or "
                "convert the file again"
            )


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

    def pieces(self, count: int, first: int = 0, unit: int = 1) -> Iterator[_Piece]:
        """Yield the rows of `count` blocks from `first` on, in pieces of about `_PIECE_BYTES`.

        They begin at multiples of `unit` rows of a section or, where a section has fewer, of
        `unit` blocks.
        """
        most = max(1, _PIECE_BYTES // (4 * math.prod(self.rows[1:])))
        for location in self.locations:
            width = location.section.width
            # Rows that are reordered are read in whole heads.
            whole = math.lcm(unit, location.head_dim if location.entry.paired else 1)
            parts = -(-width // max(whole, most // whole * whole))
            step = -(-width // (parts * whole)) * whole
            blocks = max(1, most // width)
            if width % unit:
                blocks = max(unit, blocks // unit * unit)
            for block in range(first, first + count, blocks):
                some = slice(block, min(block + blocks, first + count))
                for row in range(0, width, step):
                    yield _Piece(location, some, slice(row, min(row + step, width)))

    def fill(
        self, target: np.ndarray, read: Read, first: int = 0, inputs: slice = slice(None)
    ) -> None:
        """Write the slot's rows into `target`, a host array of whole blocks from `first` on.

        `inputs` selects the columns; further axes are filled whole.
        """
        for piece in self.pieces(len(target) // self.block, first):
            piece.write(read(piece.location, piece.rows, inputs), target, first)


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
    kept: Mapping[parameter_names.Path, Layout] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the filled tree of `array_table`, on the default device or sharded over a mesh.

    `read` returns rows of a location. Kernels are moved to the devices as rows [out, in], as in
    files, and transposed there; each process reads only the parts of its devices. The host holds
    one or two slots at a time, unless the device is a CPU without a mesh: then the tree is filled
    in host memory directly, and kernels in `kept` get the blocks that `read` returns, in tiles.
    `threads` threads read concurrently. Kernels at the paths in `bits` are rounded to so many bits
    on the devices, slot by slot. Raises InputError if the mesh does not fit the model.
    """
    table, slots = array_table(config, mtp, scan_layers), _slots(locations, scan_layers)
    if mesh is not None:
        check_shards(config, shards)
        targets = table_shardings(table, mesh, shards)
    elif jax.default_backend() == "cpu":
        # device_put adopts aligned host arrays on CPU, where jnp.asarray copies half a gigabyte.
        return jax.device_put(_on_host(table, dtype, slots, read, threads, kept))
    else:
        device = SingleDeviceSharding(jax.devices()[0])
        targets = jax.tree.map(lambda _: device, table)

    shapes, placements = _storage(table, dtype, targets, bits)

    def zeros() -> dict[str, Any]:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    # One program for all parameters.
    params: dict[str, Any] = jax.jit(zeros, out_shardings=placements)()

    def read_slot(slot: _Slot) -> tuple[_Slot, Sharding, dict[Any, np.ndarray]]:
        leaf, entry = (parameter_names.lookup(tree, slot.path) for tree in (targets, table))
        target = _of_rows(leaf, len(slot.index), slot.is_kernel)
        parts = target.addressable_devices_indices_map(slot.rows).values()
        distinct = {_ranges(part): part for part in parts}
        of_dtype = entry.dtype(dtype)
        rows = {key: _read_part(slot, part, of_dtype, read) for key, part in distinct.items()}
        return slot, target, rows

    log, weights, done = share_logger(_READING), [math.prod(slot.rows) for slot in slots], 0
    for number, (slot, target, rows) in enumerate(_read_ahead(slots, read_slot, threads)):
        log(done / sum(weights))
        done += weights[number]
        *parents, last = slot.path
        node = parameter_names.lookup(params, tuple(parents))
        leaves, structure = jax.tree.flatten(parameter_names.lookup(placements, slot.path))
        set_part = _setter(tuple(leaves), structure, slot.is_kernel, bits.get(slot.path))
        node[last] = set_part(node[last], np.array(slot.index, np.int32), _put(slot, target, rows))
    return params


def _storage(
    table: dict[str, Any],
    dtype: np.dtype,
    shardings: dict[str, Any],
    bits: Mapping[parameter_names.Path, int],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shapes and the shardings of the arrays that are stored for a table's entries.

    Kernels at the paths in `bits` are quantized.
    """

    def shape(path: tuple[Any, ...], entry: Parameter) -> Any:
        leaf = jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype))
        count = bits.get(tuple(step.key for step in path))
        if count is None:
            return leaf
        return jax.eval_shape(lambda kernel: quantize(kernel, count, has_one_scale(count)), leaf)

    def placement(where: Sharding, entry: Parameter, stored: Any) -> Any:
        if not isinstance(stored, QuantizedKernel):
            return where
        arrays, structure = jax.tree.flatten(stored)
        places = [where] * len(arrays)
        if isinstance(where, NamedSharding):
            parts = array_partitions(
                where.spec, len(entry.shape), stored.bits, has_one_scale(stored.bits)
            )
            places = [NamedSharding(where.mesh, part) for part in parts]
        return jax.tree.unflatten(structure, places)

    shapes = jax.tree_util.tree_map_with_path(
        shape, table, is_leaf=lambda node: isinstance(node, Parameter)
    )
    return shapes, jax.tree.map(placement, shardings, table, shapes)


def _put(slot: _Slot, target: Sharding, rows: dict[Any, np.ndarray]) -> jax.Array:
    """Return a slot's rows as a device array, from the parts that this process has read."""
    return jax.make_array_from_callback(slot.rows, target, lambda part: rows[_ranges(part)])


def _ranges(part: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((axis.start, axis.stop) for axis in part)


def _read_part(slot: _Slot, part: tuple[slice, ...], dtype: Any, read: Read) -> np.ndarray:
    """Return the part of a slot's rows that one device holds, in `dtype`."""
    first, stop, _ = part[0].indices(slot.rows[0])
    # Whole blocks are read: a little more if there are more devices than key/value heads.
    begin, end = first // slot.block, -(-stop // slot.block)
    sizes = [len(range(size)[axis]) for axis, size in zip(part[1:], slot.rows[1:], strict=True)]
    rows = np.empty(((end - begin) * slot.block, *sizes), dtype)
    slot.fill(rows, read, begin, *part[1:2])
    return rows[first - begin * slot.block : stop - begin * slot.block]


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
    table: dict[str, Any],
    locations: Iterable[parameter_names.Location],
    tensors: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Return a tree of host arrays, in the dtypes of the tensors, filled from tensors in memory.

    `tensors` are arrays by name, and `locations` say where in the tree of `table` each belongs. A
    leaf of several tensors has the dtype that holds the numbers of all.
    """

    def read(location: parameter_names.Location, rows: slice, inputs: slice) -> np.ndarray:
        index = tensor_layout.own_rows(location, rows, inputs)
        return tensor_layout.from_stored(tensors[location.name][index], location)

    params: dict[str, Any] = {}
    slots, dtypes = _slots(locations, scan_layers=True), dict[parameter_names.Path, set[Any]]()
    for slot in slots:
        stored = {tensors[location.name].dtype for location in slot.locations}
        dtypes.setdefault(slot.path, set()).update(stored)
    for slot in slots:
        rows = np.empty(slot.rows, np.result_type(*dtypes[slot.path]))
        slot.fill(rows, read)
        values = rows.T if slot.is_kernel else rows
        *parents, last = slot.path
        node = functools.reduce(lambda node, name: node.setdefault(name, {}), parents, params)
        if not slot.index:
            node[last] = values
            continue
        if last not in node:
            node[last] = np.empty(parameter_names.lookup(table, slot.path).shape, values.dtype)
        node[last][slot.index] = values
    return params


def _on_host(
    table: dict[str, Any],
    dtype: Any,
    slots: Sequence[_Slot],
    read: Read,
    threads: int,
    kept: Mapping[parameter_names.Path, Layout],
) -> dict[str, Any]:
    """Return the tree of `table` in host memory, filled in chunks of rows.

    The arguments are those of `build`; `dtype` is the model's.
    """
    params = parameter_names.allocate(table, dtype)
    for (*parents, last), layout in kept.items():
        parameter_names.lookup(params, tuple(parents))[last] = empty_tiles(layout)

    def write(task: tuple[_Slot, Sequence[_Piece]]) -> None:
        slot, pieces = task
        leaf = parameter_names.lookup(params, slot.path)
        for piece in pieces:
            rows = read(piece.location, piece.rows, slice(None))
            if isinstance(leaf, TiledKernel):
                layer = int(np.ravel_multi_index(slot.index, leaf.layout.lead)) if slot.index else 0
                piece.write_tiles(rows, leaf, layer)
            elif slot.is_kernel:
                piece.write(_padded(rows, leaf.dtype), leaf[slot.index].T)
            else:
                piece.write(rows, leaf[slot.index])

    tasks = [task for slot in slots for task in _tasks(slot, slot.path in kept)]
    log = share_logger(_READING)
    with ThreadPoolExecutor(threads) as pool:
        for number, _ in enumerate(pool.map(write, tasks), 1):
            log(number / len(tasks))
    return params


def _tasks(slot: _Slot, in_tiles: bool) -> Iterator[tuple[_Slot, Sequence[_Piece]]]:
    """Yield the pieces of a slot, together where two of them may be written to the same tile."""
    aligned = all(location.section.width % tiles.ROWS == 0 for location in slot.locations)
    apart = aligned or len(slot.locations) == 1
    unit = tiles.ROWS if in_tiles and apart else 1
    pieces = list(slot.pieces(slot.rows[0] // slot.block, unit=unit))
    if in_tiles and not apart:
        yield slot, pieces
    else:
        yield from ((slot, [piece]) for piece in pieces)


def _padded(rows: np.ndarray, dtype: Any) -> np.ndarray:
    """Return a copy in `dtype`, with padding between rows, which is quicker to transpose."""
    width = rows.shape[1]
    padded = np.empty((len(rows), width + _PADDING), dtype)[:, :width]
    np.copyto(padded, rows, casting="unsafe")
    return padded


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
def _setter(
    targets: tuple[Sharding, ...], structure: Any, is_kernel: bool, bits: int | None
) -> Callable[..., Any]:
    """Return a compiled function (leaf, index, rows) that writes rows into a leaf at an index.

    With `bits` the leaf is a quantized kernel of so many bits, to which the rows are rounded.
    `targets` are the shardings of the leaf's arrays, and `structure` is its tree.
    """

    def put(leaf: Any, index: jax.Array, rows: jax.Array) -> Any:
        values: Any = rows.T if is_kernel else rows
        if bits is not None:
            values = quantize(values, bits, has_one_scale(bits))

        def write(array: jax.Array, values: jax.Array) -> jax.Array:
            lead = [index[axis] for axis in range(index.shape[0])]
            start = (*lead, *[0] * values.ndim)
            values = values.reshape((1,) * len(lead) + values.shape)
            return lax.dynamic_update_slice(array, values, start)

        return jax.tree.map(write, leaf, values)

    shardings = jax.tree.unflatten(structure, targets)
    return jax.jit(put, donate_argnums=0, out_shardings=shardings)
