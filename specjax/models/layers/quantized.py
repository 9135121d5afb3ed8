"""Kernels in few bits: what all forms of them have in common, and the form for XLA.

The latter is that of GGUF's Q8_0, Q4_0 and Q4_1: a row of integers per output, in groups of 32
inputs with a scale each. A weight is `scale * integer`, plus a minimum in Q4_1. Products are
computed in float32 from unrounded activations, so that a model from such a file equals its float32
version up to the order of sums.
"""

from __future__ import annotations

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

GROUP = 32
"""The number of inputs that share a scale."""


class QuantizedKernel(abc.ABC):
    """A kernel [*L, D, F] in fewer bits than floats have, as F rows of D inputs; L are layers.

    Subclasses are dataclasses of arrays. With `layer`, the value stands for that layer's kernel
    [D, F] of the stack, which products read in place. `activation_bits` are those to which products
    round activations.
    """

    layer: Int[Array, ""] | None
    activation_bits: int | None

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel: [*L, D, F], or [D, F] if `layer` is set."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """The most bits of a weight, without scales."""

    @abc.abstractmethod
    def bytes_by_form(self) -> dict[str, int]:
        """Return how many bytes, with scales, are in each of the forms in which weights are."""

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def at_layer(self, index: Int[Array, ""] | int) -> QuantizedKernel:
        """Return the kernel of layer `index` of the stack, without copying it."""
        return self.replace(layer=jnp.asarray(index, jnp.int32))

    @abc.abstractmethod
    def with_one_stack(self) -> QuantizedKernel:
        """Return the kernel with all stacked axes, such as layers and experts, as one axis."""

    @abc.abstractmethod
    def as_stack(self) -> QuantizedKernel:
        """Return the kernel [*L, D, F] as the only one of a stack, [1, *L, D, F]."""

    @abc.abstractmethod
    def layers(self, first: int, stop: int) -> QuantizedKernel:
        """Return the kernels `first` to `stop` of the first stacked axis."""

    @abc.abstractmethod
    def columns(self, ids: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Return the weights [*N, D] of the outputs `ids`, in float32."""

    @abc.abstractmethod
    def take(self, ids: Int[Array, "N"]) -> QuantizedKernel:
        """Return the kernel [D, F] restricted to the outputs `ids`."""

    @abc.abstractmethod
    def resized(self, outputs: int) -> QuantizedKernel:
        """Return the kernel [D, F] with `outputs` outputs, truncated or zero-padded."""

    @abc.abstractmethod
    def dequantized(self, dtype: Any = jnp.float32) -> Float[Array | np.ndarray, "*L D F"]:
        """Return the weights as an array of `dtype`, computed in float32."""

    @abc.abstractmethod
    def multiply(self, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
        """Return the product of activations and the kernel [D, F], in float32."""


@struct.dataclass
class GroupedKernel(QuantizedKernel):
    """A quantized kernel of 4-bit or 8-bit integers, for XLA.

    Each row has J scales, one per group of 32 integers, or a single one for the whole row (per
    channel). `values` are int8, or two 4-bit integers per byte: in a group's 16 bytes, byte i has
    integer i in its low half and integer i + 16 in its high half. Scales are float32, with which
    products are faster than with the half precision of files. Products round activations to
    `activation_bits`, if given, which is emulated in floats.
    """

    values: Int8[Array | np.ndarray, "*L F D"] | UInt8[Array | np.ndarray, "*L F D_over_2"]
    scales: Float32[Array | np.ndarray, "*L F J"]
    minimums: Float32[Array | np.ndarray, "*L F J"] | None
    layer: Int[Array, ""] | None = None
    activation_bits: int | None = struct.field(pytree_node=False, default=None)

    @property
    def bits(self) -> int:
        """The bits of each integer: 4 or 8."""
        return 8 if self.minimums is None else 4

    def bytes_by_form(self) -> dict[str, int]:
        """Return how many bytes the kernel has, by its number of bits as text."""
        return {f"{self.bits}-bit": sum(array.nbytes for array in jax.tree.leaves(self))}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel: [*L, D, F], or [D, F] if `layer` is set."""
        *lead, outputs, _ = self.scales.shape
        inputs = self.values.shape[-1] * 8 // self.bits
        return (*(lead if self.layer is None else ()), inputs, outputs)

    @property
    def per_channel(self) -> bool:
        """Whether each output has a single scale instead of one per group."""
        return self.scales.shape[-1] == 1 != self.shape[-2] // GROUP

    def with_one_stack(self) -> GroupedKernel:
        """Return the kernel with all stacked axes, such as layers and experts, as one axis."""
        return jax.tree.map(lambda array: array.reshape(-1, *array.shape[-2:]), self)

    def as_stack(self) -> GroupedKernel:
        """Return the kernel [*L, D, F] as the only one of a stack, [1, *L, D, F]."""
        return jax.tree.map(lambda array: array[None], self)

    def layers(self, first: int, stop: int) -> GroupedKernel:
        """Return the kernels `first` to `stop` of the first stacked axis."""
        return jax.tree.map(lambda array: array[first:stop], self)

    def partitions(self, kernel: PartitionSpec) -> list[PartitionSpec]:
        """Return how each array in this kernel is sharded, given how the kernel's axes are."""
        if self.layer is None:
            return array_partitions(kernel, self.ndim, self.bits, self.per_channel)
        of_stack = PartitionSpec(None, *kernel)
        split = array_partitions(of_stack, self.ndim + 1, self.bits, self.per_channel)
        return [*split, PartitionSpec()]

    def columns(self, ids: Int[Array, "*N"]) -> Float[Array, "*N D"]:
        """Return the weights [*N, D] of the outputs `ids`, in float32."""
        chosen = self.take(ids)
        return _weights(chosen.values, chosen.scales, chosen.minimums)

    def take(self, ids: Int[Array, "*N"]) -> GroupedKernel:
        """Return the kernel [D, F] restricted to the outputs `ids`."""
        return jax.tree.map(lambda rows: jnp.take(rows, ids, axis=0), self)

    def resized(self, outputs: int) -> GroupedKernel:
        """Return the kernel [D, F] with `outputs` outputs, truncated or zero-padded."""

        def fitted(rows: jax.Array) -> jax.Array:
            more = max(0, outputs - rows.shape[0])
            return jnp.pad(rows[:outputs], ((0, more), (0, 0)))

        return jax.tree.map(fitted, self)

    def of_layer(self) -> GroupedKernel:
        """Return a copy of the kernel [D, F] of `layer`, or the kernel itself without `layer`."""
        if (index := self.layer) is None:
            return self

        def chosen(array: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(array, index, keepdims=False)

        return jax.tree.map(chosen, self.replace(layer=None))

    def dequantized(self, dtype: Any = jnp.float32) -> Float[Array | np.ndarray, "*L D F"]:
        """Return the weights as an array of `dtype`, computed in float32; NumPy's if these are."""
        kernel = self.of_layer()
        rows = _weights(kernel.values, kernel.scales, kernel.minimums)
        return rows.swapaxes(-1, -2).astype(dtype)

    def multiply(self, x: Float[Array, "N D"]) -> Float[Array, "N F"]:
        """Return the product of activations and the kernel [D, F], in float32.

        On one GPU a Pallas kernel reads 4-bit integers in groups. With one scale per channel, XLA
        converts the integers within its product. In all other cases XLA first writes the layer's
        weights to memory. All of them round activations in the same way.
        """
        if (bits := self.activation_bits) is not None:
            x = round_activations(x, bits)
        if self.per_channel:
            return _per_channel_product(x, self.of_layer())
        alone = jax.sharding.get_abstract_mesh().empty
        return _grouped_product(x, self.of_layer(), alone)


def quantize(
    kernel: Float[Array, "*L D F"],
    bits: int,
    per_channel: bool = False,
    scale_dtype: Any = jnp.float16,
) -> GroupedKernel:
    """Return a kernel rounded to the nearest integers in groups of 32 inputs, or per output.

    `bits` is 4 or 8, and must be 8 if `per_channel` is set; D must be a multiple of 32. With 8 bits
    the integers are -127 to 127 and the largest magnitude is exact; with 4 bits they are 0 to 15,
    and the largest and smallest weights are exact: up to the rounding of scales and minimums to
    `scale_dtype`.
    """
    rows = jnp.swapaxes(kernel, -1, -2).astype(jnp.float32)
    groups = rows.reshape(*rows.shape[:-1], -1, rows.shape[-1] if per_channel else GROUP)

    def rounded(numbers: Float[Array, "*L F J"]) -> Float[Array, "*L F J"]:
        # Without the barrier XLA leaves out both conversions.
        return lax.optimization_barrier(numbers.astype(scale_dtype)).astype(jnp.float32)

    if bits == 8:
        scales = rounded(jnp.max(jnp.abs(groups), axis=-1) / 127)
        integers = jnp.clip(jnp.round(groups / _divisor(scales)), -127, 127).astype(jnp.int8)
        return GroupedKernel(integers.reshape(rows.shape), scales, None)
    minimums = rounded(jnp.min(groups, axis=-1))
    above = groups - minimums[..., None]
    scales = rounded(jnp.max(above, axis=-1) / 15)
    integers = jnp.clip(jnp.round(above / _divisor(scales)), 0, 15).astype(jnp.uint8)
    low, high = jnp.split(integers, 2, axis=-1)
    values = (low | (high << 4)).reshape(*rows.shape[:-1], -1)
    return GroupedKernel(values, scales, minimums)


def has_one_scale(bits: int) -> bool:
    """Return whether kernels rounded to so many bits have one scale per output on this backend.

    On accelerators those of 8 bits do, which makes products faster there.
    """
    return bits == 8 and jax.default_backend() != "cpu"


def bytes_per_weight(bits: int) -> float:
    """Return the bytes of a kernel of so many bits on this backend, per weight."""
    scales = 0 if has_one_scale(bits) else (4 if bits == 8 else 8) / GROUP
    return bits / 8 + scales


def array_partitions(
    kernel: PartitionSpec, ndim: int, bits: int, per_channel: bool
) -> list[PartitionSpec]:
    """Return how each array in a quantized kernel is sharded, given how the kernel's axes are.

    `ndim` is the number of the kernel's axes; `bits` and `per_channel` are as in `quantize`.
    """
    *lead, inputs, outputs = (*kernel, *[None] * (ndim - len(kernel)))
    of_groups = None if per_channel else inputs
    axes = (inputs, of_groups) if bits == 8 else (inputs, of_groups, of_groups)
    return [PartitionSpec(*lead, outputs, axis) for axis in axes]


def round_activations(x: Float[Array, "*N D"], bits: int) -> Float[Array, "*N D"]:
    """Return activations rounded to integers of `bits` bits, in groups of 32 with a scale each.

    The integers are symmetric (-127 to 127 or -7 to 7), and the result is in floating point:
    products with it are emulated at the cost of float products.
    """
    largest = 2 ** (bits - 1) - 1
    groups = x.reshape(*x.shape[:-1], -1, GROUP).astype(jnp.float32)
    scales = jnp.max(jnp.abs(groups), axis=-1) / largest
    integers = jnp.round(groups / _divisor(scales))
    return (integers * scales[..., None]).reshape(x.shape).astype(x.dtype)


def _divisor(scales: Float[Array, "*L F J"]) -> Float[Array, "*L F J 1"]:
    return jnp.where(scales == 0, 1, scales)[..., None]


def _weights(
    values: Array | np.ndarray,
    scales: Float[Array | np.ndarray, "*L F J"],
    minimums: Array | np.ndarray | None,
) -> Float[Array | np.ndarray, "*L F D"]:
    """Return the rows of weights that integers, scales and minimums stand for, in float32."""
    groups = values.reshape(*scales.shape, -1)
    if minimums is not None:
        groups = jnp.concatenate([groups & 15, groups >> 4], axis=-1)
    weights = groups.astype(jnp.float32) * scales[..., None]
    if minimums is not None:
        weights += minimums[..., None]
    return weights.reshape(*scales.shape[:-1], -1)


def _per_channel_product(x: Float[Array, "N D"], kernel: GroupedKernel) -> Float[Array, "N F"]:
    """Return the product with the integers, multiplied by the scales, without copying weights."""
    product = lax.dot_general(
        x,
        jnp.asarray(kernel.values).astype(x.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return product * kernel.scales[None, :, 0]


def _grouped_product(
    x: Float[Array, "N D"], kernel: GroupedKernel, alone: bool
) -> Float[Array, "N F"]:
    """Return the product with integers in groups, by Pallas if possible and otherwise by XLA.

    `alone` says that the program is for a single device.
    """

    def by_xla(x: jax.Array, *arrays: jax.Array | None) -> jax.Array:
        weights = GroupedKernel(*arrays).dequantized(x.dtype)
        return jnp.matmul(x, weights, precision=lax.Precision.HIGHEST).astype(jnp.float32)

    arrays = kernel.values, kernel.scales, kernel.minimums
    if jax.default_backend() == "cpu" or not alone or kernel.bits != 4:
        return by_xla(x, *arrays)
    # Pallas takes half a second to import, and no CPU needs it.
    from specjax.models.layers import grouped_product

    if not grouped_product.takes(*x.shape, kernel.shape[-1]):
        return by_xla(x, *arrays)
    return lax.platform_dependent(x, *arrays, cuda=grouped_product.multiply, default=by_xla)
