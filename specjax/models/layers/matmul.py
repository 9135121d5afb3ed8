"""Matrix products in one dtype, accumulated and returned in another; gradients likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


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
    """`einsum` of two arrays in x's dtype, or `out`.

    With `multiply` (bfloat16, in training) both are rounded to that dtype first, and so is the
    gradient; sums are in float32 in any case. Two to five times as fast where the device supports
    that dtype in hardware.
    """
    if isinstance(kernel, ChosenKernel):
        (y,) = _chosen_products(x, [kernel], multiply, out)
        return y
    if multiply is None or jnp.dtype(multiply) == x.dtype:
        return jnp.einsum(
            equation, x, kernel, precision=_exact(x.dtype), preferred_element_type=out
        )
    result = _rounded(equation, jnp.dtype(multiply), x, kernel)
    return result.astype(x.dtype if out is None else out)


def products(
    equation: str,
    x: jax.Array,
    kernels: Sequence[jax.Array | ChosenKernel],
    *,
    multiply: Any = None,
    out: Any = None,
) -> list[jax.Array]:
    """The `product` with each of several kernels; of chosen ones they may run beside each other."""
    if all(isinstance(kernel, ChosenKernel) for kernel in kernels):
        return _chosen_products(x, kernels, multiply, out)
    return [product(equation, x, kernel, multiply=multiply, out=out) for kernel in kernels]


_FEW_ROWS = 2, 7
"""For so many rows of float32, XLA's CPU backend is faster with the rows stored as columns.

For three to five it takes a quarter less time, and for two that are made three: the code is
Eigen's, which YNNPACK's replaced for rows.
"""


def _chosen_products(
    x: Float[Array, "*B D"], kernels: Sequence[ChosenKernel], multiply: Any, out: Any
) -> list[Float[Array, "*B _"]]:
    """The products of x's last axis and the first of kernels of the same layers, in one branch."""
    result = x.dtype if out is None else out
    dtype = x.dtype if multiply is None else jnp.dtype(multiply)
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    least, most = _FEW_ROWS
    if few := least <= len(rows) <= most and dtype == jnp.float32:
        # Without the barrier the product is turned back.
        padded = jnp.pad(rows, ((0, max(0, least + 1 - len(rows))), (0, 0)))
        left = lax.optimization_barrier(padded.T)
    else:
        left = rows
    times = functools.partial(
        lax.dot_general,
        dimension_numbers=(((0 if few else 1,), (0,)), ((), ())),
        precision=_exact(dtype),
        preferred_element_type=result if multiply is None else jnp.float32,
    )

    def branch(layer: tuple[Float[Array, "D _"], ...]) -> Callable[[jax.Array], list[jax.Array]]:
        return lambda left: [times(left, kernel.astype(dtype)) for kernel in layer]

    layers = zip(*(kernel.kernels for kernel in kernels), strict=True)
    found = lax.switch(kernels[0].index, [branch(layer) for layer in layers], left)
    return [y[: len(rows)].reshape(*x.shape[:-1], -1).astype(result) for y in found]


def _exact(dtype: Any) -> lax.Precision | None:
    """The precision that accelerators need to be told, which multiply float32 in fewer bits."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _einsum(equation, dtype, x, kernel)


def _forward(equation: str, dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple:
    return _einsum(equation, dtype, x, kernel), (x, kernel)


def _backward(equation: str, dtype: Any, kept: tuple, gradient: jax.Array) -> tuple:
    x, kernel = kept
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    to_x = _einsum(f"{result},{right}->{left}", dtype, gradient, kernel)
    to_kernel = _einsum(f"{left},{result}->{right}", dtype, x, gradient)
    return to_x.astype(x.dtype), to_kernel.astype(kernel.dtype)


_rounded.defvjp(_forward, _backward)


def _einsum(equation: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32
    )
