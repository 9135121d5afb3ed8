"""Kernels in the types of GGUF files, multiplied by the C++ library for CPUs as they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Int64, UInt8

from specjax.models.aligned_arrays import aligned_zeros
from specjax.models.cpu import library, tiles
from specjax.models.layers.quantized import (
    GROUP,
    GroupedKernel,
    QuantizedKernel,
    round_activations,
)

_DIGITS = {32: 0, 24: 3, 16: 2, 8: 1}
"""The bytes of an activation in fixed point, by its bits; 32 stands for floats, which have none."""


@dataclass(frozen=True)
class Layout:
    """The shape of a kernel [*lead, D, F] in tiles, and the formats of its parts.

    `kinds` are the different sequences of parts (format, number of outputs) that layers consist of,
    and `layers` has the kind of each of the stacked layers.
    """

    lead: tuple[int, ...]
    inputs: int
    kinds: tuple[tuple[tuple[str, int], ...], ...]
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls, lead: tuple[int, ...], inputs: int, layers: Sequence[Sequence[tuple[str, int]]]
    ) -> Layout:
        """Return the layout of stacked layers with these parts."""
        kinds = tuple(dict.fromkeys(map(tuple, layers)))
        return cls(lead, inputs, kinds, tuple(kinds.index(tuple(layer)) for layer in layers))

    @property
    def outputs(self) -> int:
        """The number of outputs, F."""
        return sum(rows for _, rows in self.kinds[0])

    @property
    def num_bytes(self) -> int:
        """The bytes of all layers."""
        return sum(self.layer_bytes(kind) for kind in self.layers)

    def layer_bytes(self, kind: int) -> int:
        """Return the bytes of a layer of this kind."""
        return sum(tiles.num_bytes(name, rows, self.inputs) for name, rows in self.kinds[kind])

    def bytes_of(self, layers: range) -> slice:
        """Return where the bytes of consecutive layers are."""
        first = sum(self.layer_bytes(kind) for kind in self.layers[: layers.start])
        size = sum(self.layer_bytes(self.layers[layer]) for layer in layers)
        return slice(first, first + size)

    def bytes_by_format(self) -> dict[str, int]:
        """Return the bytes of all layers that are in each format."""
        sizes: dict[str, int] = {}
        for kind in self.layers:
            for name, rows in self.kinds[kind]:
                size = tiles.num_bytes(name, rows, self.inputs)
                sizes[name] = sizes.get(name, 0) + size
        return sizes

    @functools.cached_property
    def encoded(self) -> Int64[np.ndarray, "n"]:
        """The layout as the library reads it (`tile_calls.cc`)."""
        numbers = [len(self.kinds)]
        for parts in self.kinds:
            numbers += [len(parts)]
            for name, rows in parts:
                numbers += [tiles.formats()[name].number, rows]
        return np.array([*numbers, *self.layers], np.int64)


@struct.dataclass
class TiledKernel(QuantizedKernel):
    """A quantized kernel in tiles (`models/cpu/tile_formats.h`), whose layers may differ in format.

    Products round activations to fixed point of `activation_bits` (24, 16 or 8) in groups of 32
    with a scale each; 32 leaves them in float32, None is 24 or 32, whichever is faster on this
    processor, and 4 is emulated.
    """

    data: UInt8[Array | np.ndarray, "bytes"]
    layout: Layout = struct.field(pytree_node=False)
    layer: Int[Array, ""] | None = None
    activation_bits: int | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel: [*L, D, F], or [D, F] if `layer` is set."""
        lead = self.layout.lead if self.layer is None else ()
        return (*lead, self.layout.inputs, self.layout.outputs)

    @property
    def bits(self) -> int:
        """The most bits of a weight, without scales."""
        names = {name for parts in self.layout.kinds for name, _ in parts}
        return max(tiles.formats()[name].bits for name in names)

    def bytes_by_form(self) -> dict[str, int]:
        """Return how many bytes are in each of the kernel's formats."""
        return self.layout.bytes_by_format()

    def with_one_stack(self) -> TiledKernel:
        """Return the kernel with all stacked axes as one axis."""
        lead = (math.prod(self.layout.lead),)
        return self.replace(layout=replace(self.layout, lead=lead))

    def as_stack(self) -> TiledKernel:
        """Return the kernel [*L, D, F] as the only one of a stack, [1, *L, D, F]."""
        return self.replace(layout=replace(self.layout, lead=(1, *self.layout.lead)))

    def layers(self, first: int, stop: int) -> TiledKernel:
        """Return the kernels `first` to `stop` of the first stacked axis."""
        _, *inner = self.layout.lead
        each = math.prod(inner)
        chosen = range(first * each, stop * each)
        names = [self.layout.kinds[self.layout.layers[layer]] for layer in chosen]
        layout = Layout.of((stop - first, *inner), self.layout.inputs, names)
        return self.replace(data=self.data[self.layout.bytes_of(chosen)], layout=layout)

    def columns(self, ids: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Return the weights [*N, D] of the outputs `ids`, in float32."""
        call = jax.ffi.ffi_call(
            library.TILE_ROWS,
            jax.ShapeDtypeStruct((ids.size, self.layout.inputs), jnp.float32),
            vmap_method="sequential",
        )
        rows = call(
            ids.reshape(-1).astype(jnp.int32), self._index, self.data, layout=self.layout.encoded
        )
        return rows.reshape(*ids.shape, -1)

    def take(self, ids: Int[Array | np.ndarray, "N"]) -> TiledKernel:
        """Return the kernel [D, F] of a single part restricted to the outputs `ids`.

        Outputs with a negative id are zero. The arrays must not be traced.
        """
        ((name, _),) = self.layout.kinds[0]
        taken = tiles.take(name, np.asarray(self.data), self.layout.inputs, np.asarray(ids))
        layout = Layout.of((), self.layout.inputs, [[(name, len(ids))]])
        return self.replace(data=jax.device_put(taken), layout=layout)

    def resized(self, outputs: int) -> TiledKernel:
        """Return the kernel [D, F] with `outputs` outputs, truncated or zero-padded."""
        ids = np.arange(outputs)
        return self.take(np.where(ids < self.layout.outputs, ids, -1).astype(np.int32))

    def dequantized(self, dtype: Any = jnp.float32) -> Float[Array | np.ndarray, "*L D F"]:
        """Return the weights as an array of `dtype`, computed in float32."""
        every = jnp.arange(self.layout.outputs)
        if self.layer is not None or not self.layout.lead:
            return self.columns(every).T.astype(dtype)
        stack = self.with_one_stack()
        rows = jax.lax.map(
            lambda layer: stack.at_layer(layer).columns(every), jnp.arange(len(self.layout.layers))
        )
        return rows.swapaxes(1, 2).reshape(self.shape).astype(dtype)

    def multiply(self, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
        """Return the product of activations and the kernel [D, F], in float32."""
        bits = self.activation_bits
        if bits == 4:
            x, bits = round_activations(x, bits), None
        if bits is None:
            # Without such instructions, bytes of 8 bits take two products each.
            bits = 24 if library.level().multiplies_bytes or self.bits < 8 else 32
        call = jax.ffi.ffi_call(
            library.TILE_PRODUCT,
            jax.ShapeDtypeStruct((x.shape[0], self.layout.outputs), jnp.float32),
            vmap_method="sequential",
        )
        return call(
            x.astype(jnp.float32),
            self._index,
            self.data,
            planes=np.int32(_DIGITS[bits]),
            layout=self.layout.encoded,
        )

    def write(self, layer: int, first: int, blocks: UInt8[np.ndarray, "rows row_bytes"]) -> bool:
        """Write rows of one format, in blocks of its GGUF type, as outputs `first`, ... of a layer.

        Returns whether all of their scales are finite. The kernel is on the host, and its rows were
        zero before. Calls for the same 16 rows must not run at the same time.
        """
        data = self.data[self.layout.bytes_of(range(layer, layer + 1))]
        for name, rows in self.layout.kinds[self.layout.layers[layer]]:
            size = tiles.num_bytes(name, rows, self.layout.inputs)
            if first < rows:
                return tiles.pack(name, blocks, self.layout.inputs, first, data[:size])
            data, first = data[size:], first - rows
        raise AssertionError(first)

    @property
    def _index(self) -> Int[Array, "1"]:
        return jnp.zeros((1,), jnp.int32) if self.layer is None else self.layer[None]


def empty_tiles(layout: Layout) -> TiledKernel:
    """Return a kernel of zeros on the host."""
    return TiledKernel(aligned_zeros((layout.num_bytes,), np.uint8), layout)


def tiled(kernel: GroupedKernel) -> TiledKernel:
    """Return a kernel of 4-bit or 8-bit integers in tiles.

    Its scales and minimums must be numbers in half precision.
    """
    arrays = [None if array is None else np.asarray(array) for array in jax.tree.leaves(kernel)]
    values, *numbers = arrays
    *lead, outputs, groups = numbers[0].shape
    name = "Q8_0" if kernel.bits == 8 else "Q4_1"
    count = math.prod(lead)
    layers = [[(name, outputs)]] * count
    made = empty_tiles(Layout.of(tuple(lead), groups * GROUP, layers))
    halves = [each.astype(np.float16).reshape(count, outputs, groups, 1) for each in numbers]
    parts = [half.view(np.uint8).reshape(count, outputs, groups, 2) for half in halves]
    parts.append(values.view(np.uint8).reshape(count, outputs, groups, -1))
    blocks = np.concatenate(parts, axis=-1).reshape(count, outputs, -1)
    for layer in range(count):
        made.write(layer, 0, blocks[layer])
    return made.replace(data=jax.device_put(made.data))
