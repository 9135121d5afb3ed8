"""Matrix products that round operands to one dtype and accumulate in another, with gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.errors import InputError
from specjax.models.layers.quantized import QuantizedKernel


class ChosenKernel(NamedTuple):
    """The kernels [D, F] of separate layers, and the index of the layer to use; for CPUs.

    A product with it branches over the kernels and reads the selected one in place, while XLA would
    first copy a slice of stacked kernels.
    """

    kernels: tuple[Float[Array, "D F"], ...]
    index: Int[Array, ""]


Kernel = jax.Array | ChosenKernel | QuantizedKernel
"""The right operand of a product, in any of its forms."""


def product(
    equation: str,
    x: jax.Array,
    kernel: Kernel,
    *,
    multiply: Any = None,
    out: Any = None,
) -> jax.Array:
    """Return the einsum of `x` and a kernel in full precision, in the dtype of `x` or in `out`.

    With `multiply` (bfloat16, in training and on CPUs) both operands and the gradient are first
    rounded to that dtype, and sums are in float32. This is two to five times as fast on devices
    with hardware support for the dtype. A quantized kernel is multiplied as it is (`quantized`).
    Raises InputError for a `ChosenKernel` of another dtype.
    """
    if isinstance(kernel, ChosenKernel):
        return _chosen_product(equation, x, kernel, multiply, out)
    if isinstance(kernel, QuantizedKernel):
        _check_matrix_product(equation)
        y = kernel.multiply(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype if out is None else out)
    if multiply is None or jnp.dtype(multiply) == x.dtype:
        # XLA multiplies a single row by itself, on TPUs with sums in the type of the result.
        sums = jnp.float32 if x.size == x.shape[-1] else out
        y = jnp.einsum(
            equation, x, kernel, precision=full_precision(x.dtype), preferred_element_type=sums
        )
        return y.astype(x.dtype if out is None else out)
    result = _einsum_rounded(equation, jnp.dtype(multiply), x, kernel)
    return result.astype(x.dtype if out is None else out)


_FEW_ROWS = 2, 7
"""From 2 to 7 rows of float32, XLA's CPU backend is faster with the rows stored as columns.

It then calls Eigen instead of YNNPACK: a quarter less time for three to five rows, and a tenth for
seven. Two rows take as long as three, and are padded to three.
"""


def _chosen_product(
    equation: str, x: Float[Array, "*B D"], kernel: ChosenKernel, multiply: Any, out: Any
) -> Float[Array, "*B F"]:
    """Return the product with the selected kernel, in a branch of the program for each layer.

    `multiply` and `out` are as in `product`. The kernels are not rounded. Raises InputError if
    their dtype is not that of the product.
    """
    _check_matrix_product(equation)
    dtype = jnp.dtype(x.dtype if multiply is None else multiply)
    if any(of_layer.dtype != dtype for of_layer in kernel.kernels):
        raise InputError(
            f"multiply={dtype}: kernels of layers='apart' would be rounded for every product; use "
            "Form.for_training"
        )
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    out = x.dtype if multiply is not None and out is None else out
    least, most = _FEW_ROWS
    if as_columns := least <= len(rows) <= most and dtype == jnp.float32:
        padded = jnp.pad(rows, ((0, 1 if len(rows) == 2 else 0), (0, 0)))
        # Without the barrier XLA undoes the transposition.
        operand = lax.optimization_barrier(padded.T)
    else:
        operand = rows
    multiply_by = functools.partial(
        lax.dot_general,
        dimension_numbers=(((0 if as_columns else 1,), (0,)), ((), ())),
        precision=full_precision(dtype),
        preferred_element_type=out,
    )
    branches = [functools.partial(multiply_by, rhs=of_layer) for of_layer in kernel.kernels]
    y = lax.switch(kernel.index, branches, operand)
    return y[: len(rows)].reshape(*x.shape[:-1], -1)


def _check_matrix_product(equation: str) -> None:
    """Assert that `equation` multiplies the last axis of x by a matrix [D, F]."""
    inputs, result = equation.split("->")
    left_axes, right_axes = inputs.split(",")
    assert right_axes[0] == left_axes[-1], equation
    assert result == left_axes[:-1] + right_axes[1:], equation


def full_precision(dtype: Any) -> lax.Precision | None:
    """Return the `precision` argument of a product of `dtype` whose operands must not be rounded.

    It is HIGHEST for float32, which accelerators multiply in fewer bits by default (TF32 on an H200
    gave attention over several tokens a relative error of 3e-4), and None otherwise.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum_rounded(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _einsum(equation, dtype, x, kernel)


def _einsum_rounded_forward(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple:
    return _einsum(equation, dtype, x, kernel), (x, kernel)


def _einsum_rounded_backward(equation: str, dtype: Any, saved: tuple, gradient: jax.Array) -> tuple:
    x, kernel = saved
    inputs, result = equation.split("->")
    left_axes, right_axes = inputs.split(",")
    to_x = _einsum(f"{result},{right_axes}->{left_axes}", dtype, gradient, kernel)
    to_kernel = _einsum(f"{left_axes},{result}->{right_axes}", dtype, x, gradient)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


_einsum_rounded.defvjp(_einsum_rounded_forward, _einsum_rounded_backward)


def _einsum(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32
    )
