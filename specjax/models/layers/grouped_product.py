"""Products with 4-bit kernels in groups of 32 as one GPU kernel, written in Pallas for Triton.

Each program unpacks the weights of some outputs, a few groups at a time, in registers, and
multiplies them by all tokens, so that only the packed integers are read from memory. XLA would
first write the unpacked weights to memory in bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, UInt8

_HALF = 16
"""Half the size of a group; a byte holds one weight of each half."""
_OUTPUTS = 32
"""The number of outputs that a program computes."""
_BYTES = 64
"""The packed bytes per output that a program reads at a time; they hold 128 weights."""
_FEWEST_TOKENS, _MOST_TOKENS = 16, 64
"""The fewest tokens, due to the hardware's smallest product, and the most that fit a program."""


def takes(tokens: int, inputs: int, outputs: int) -> bool:
    """Return whether the kernel can multiply `tokens` rows by weights [`inputs`, `outputs`]."""
    return tokens <= _MOST_TOKENS and inputs % (2 * _BYTES) == 0 and outputs % _OUTPUTS == 0


def multiply(
    x: Float[Array, "N D"],
    values: UInt8[Array, "F D_over_2"],
    scales: Float32[Array, "F J"],
    minimums: Float32[Array, "F J"],
    interpret: bool = False,
) -> Float[Array, "N F"]:
    """Return x times a 4-bit kernel, in float32.

    `values`, `scales` and `minimums` are the arrays of a `QuantizedKernel`. Weights are rounded to
    the dtype of `x`. `interpret` runs the kernel without a GPU, for tests.
    """
    tokens, inputs = x.shape
    outputs, groups = scales.shape
    rows = max(_FEWEST_TOKENS, pl.next_power_of_2(tokens))
    halves = jnp.pad(x, ((0, rows - tokens), (0, 0))).reshape(rows, groups, 2, _HALF)
    low, high = (halves[:, :, half].reshape(rows, inputs // 2) for half in range(2))
    whole = pl.BlockSpec((rows, inputs // 2), lambda i: (0, 0))
    of_group = pl.BlockSpec((_OUTPUTS, groups), lambda i: (i, 0))
    product = pl.pallas_call(
        functools.partial(_program, steps=inputs // 2 // _BYTES),
        grid=(outputs // _OUTPUTS,),
        in_specs=[
            whole,
            whole,
            pl.BlockSpec((_OUTPUTS, inputs // 2), lambda i: (i, 0)),
            of_group,
            of_group,
        ],
        out_specs=pl.BlockSpec((rows, _OUTPUTS), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_product",
    )(low, high, values, scales, minimums)
    return product[:tokens]


def _program(
    low_ref: Any,
    high_ref: Any,
    values_ref: Any,
    scales_ref: Any,
    minimums_ref: Any,
    out_ref: Any,
    *,
    steps: int,
) -> None:
    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        columns = pl.ds(step * _BYTES, _BYTES)
        groups = pl.ds(step * (_BYTES // _HALF), _BYTES // _HALF)
        packed = values_ref[:, columns].astype(jnp.int32)
        scale, minimum = _spread(scales_ref[:, groups]), _spread(minimums_ref[:, groups])
        for x_ref, integers in ((low_ref, packed & 15), (high_ref, packed >> 4)):
            x = x_ref[:, columns]
            weights = (integers.astype(jnp.float32) * scale + minimum).astype(x.dtype)
            total += plgpu.dot(x, weights, trans_b=True, allow_tf32=False).astype(jnp.float32)
        return total

    out_ref[...] = lax.fori_loop(0, steps, add, jnp.zeros(out_ref.shape, jnp.float32))


def _spread(numbers: Float[Array, "F J"]) -> Float[Array, "F J_times_16"]:
    """Return each group's number repeated for each of the group's bytes."""
    outputs, groups = numbers.shape
    return jnp.broadcast_to(numbers[:, :, None], (outputs, groups, _HALF)).reshape(outputs, -1)
