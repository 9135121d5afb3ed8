"""Matrix products in one dtype, accumulated and returned in another; gradients likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.errors import InputError


class ChosenKernel(NamedTuple):
    """Kernels [D, F] of layers apart, and which layer is meant; for CPUs.

    A product with it is a branch for each kernel, which reads the kernel where it lies: of stacked
    kernels XLA copies the slice first.
    """

    kernels: tuple[Float[Array, "D F"], ...]
    index: Int[Array, ""]


def product(
    equation: str,
    x: jax.Array,
    kernel: jax.Array | ChosenKernel,
    *,
    multiply: Any = None,
    out: Any = None,
) -> jax.Array:
    """`einsum` of two arrays in x's dtype, or `out`, in full precision.

    With `multiply` (bfloat16, in training and on CPUs) both are rounded to that dtype first, and so
    is the gradient; sums are in float32 in any case. Two to five times as fast where the device
    supports that dtype in hardware. Raises InputError for a chosen kernel that is to be rounded.
    """
    if isinstance(kernel, ChosenKernel):
        (y,) = _chosen_products(equation, x, [kernel], multiply, out)
        return y
    if multiply is None or jnp.dtype(multiply) == x.dtype:
        return jnp.einsum(
            equation, x, kernel, precision=full_precision(x.dtype), preferred_element_type=out
        )
    result = _einsum_rounded(equation, jnp.dtype(multiply), x, kernel)
    return result.astype(x.dtype if out is None else out)


def products(
    equation: str,
    x: jax.Array,
    kernels: Sequence[jax.Array | ChosenKernel],
    *,
    multiply: Any = None,
) -> list[jax.Array]:
    """The `product` with each of several kernels; of chosen ones they may run beside each other.

    Raises InputError as `product` does.
    """
    if all(isinstance(kernel, ChosenKernel) for kernel in kernels):
        return _chosen_products(equation, x, kernels, multiply, None)
    return [product(equation, x, kernel, multiply=multiply) for kernel in kernels]


_FEW_ROWS = 2, 7
"""For so many rows of float32, XLA's CPU backend is faster with the rows stored as columns.

The code is Eigen's then, instead of YNNPACK's: a quarter less time for three to five rows, and a
tenth for seven; two take as long as three, and are made three.
"""


def _chosen_products(
    equation: str,
    x: Float[Array, "*B D"],
    kernels: Sequence[ChosenKernel],
    multiply: Any,
    out: Any,
) -> list[Float[Array, "*B _"]]:
    """The products with kernels of the same layer, all in one branch; no kernel is rounded."""
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    assert right[0] == left[-1], equation
    assert result == left[:-1] + right[1:], equation
    dtype = jnp.dtype(x.dtype if multiply is None else multiply)
    if any(own.dtype != dtype for kernel in kernels for own in kernel.kernels):
        raise InputError(
            f"multiply={dtype}: kernels of layers='apart' would be rounded for every product; use "
            "Form.for_training"
        )
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    out = x.dtype if multiply is not None and out is None else out
    least, most = _FEW_ROWS
    if few := least <= len(rows) <= most and dtype == jnp.float32:
        padded = jnp.pad(rows, ((0, 1 if len(rows) == 2 else 0), (0, 0)))
        # Without the barrier the product is turned back.
        operand = lax.optimization_barrier(padded.T)
    else:
        operand = rows
    times = functools.partial(
        lax.dot_general,
        dimension_numbers=(((0 if few else 1,), (0,)), ((), ())),
        precision=full_precision(dtype),
        preferred_element_type=out,
    )

    def branch(layer: tuple[Float[Array, "D _"], ...]) -> Callable[[jax.Array], list[jax.Array]]:
        return lambda operand: [times(operand, kernel) for kernel in layer]

    layers = zip(*(kernel.kernels for kernel in kernels), strict=True)
    found = lax.switch(kernels[0].index, [branch(layer) for layer in layers], operand)
    return [y[: len(rows)].reshape(*x.shape[:-1], -1) for y in found]


def full_precision(dtype: Any) -> lax.Precision | None:
    """The `precision` for a product of operands of a dtype that must not be rounded.

    HIGHEST for float32, which accelerators multiply in fewer bits by default (on an H200 in TF32:
    attention over several tokens was off by 3e-4, relatively), else None.
    """
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum_rounded(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _einsum(equation, dtype, x, kernel)


def _einsum_rounded_forward(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple:
    return _einsum(equation, dtype, x, kernel), (x, kernel)


def _einsum_rounded_backward(equation: str, dtype: Any, kept: tuple, gradient: jax.Array) -> tuple:
    x, kernel = kept
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    to_x = _einsum(f"{result},{right}->{left}", dtype, gradient, kernel)
    to_kernel = _einsum(f"{left},{result}->{right}", dtype, x, gradient)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


_einsum_rounded.defvjp(_einsum_rounded_forward, _einsum_rounded_backward)


def _einsum(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32
    )
