"""Matrix products in one dtype, accumulated and returned in another; gradients likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
        return _chosen_product(x, kernel, multiply, out)
    if multiply is None or jnp.dtype(multiply) == x.dtype:
        return jnp.einsum(
            equation, x, kernel, precision=_exact(x.dtype), preferred_element_type=out
        )
    result = _rounded(equation, jnp.dtype(multiply), x, kernel)
    return result.astype(x.dtype if out is None else out)


_FEW_ROWS = 2, 7
"""For so many rows of float32, XLA's CPU backend is faster with the rows stored as columns.

For three to five it takes a quarter less time, and for two that are made three: the code is
Eigen's, which YNNPACK's replaced for rows.
"""


def _chosen_product(
    x: Float[Array, "*B D"], kernel: ChosenKernel, multiply: Any, out: Any
) -> Float[Array, "*B F"]:
    """The product with the chosen kernel, of x's last axis and the kernel's first."""
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
    contracted = (((0 if few else 1,), (0,)), ((), ()))
    accumulated = result if multiply is None else jnp.float32

    def branch(own: Float[Array, "D F"]) -> Callable[[jax.Array], jax.Array]:
        return lambda left: lax.dot_general(
            left,
            own.astype(dtype),
            contracted,
            precision=_exact(dtype),
            preferred_element_type=accumulated,
        )

    y = lax.switch(kernel.index, [branch(own) for own in kernel.kernels], left)
    return y[: len(rows)].reshape(*x.shape[:-1], -1).astype(result)


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
