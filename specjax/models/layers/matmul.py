"""Matrix products in one dtype, accumulated and returned in another; gradients likewise."""

from __future__ import annotations

import functools
import math
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
        least, most = _FEW_ROWS
        few = least <= math.prod(x.shape[:-1]) <= most and x.dtype == jnp.float32
        if few and multiply is None:
            return _product_by_columns(x, kernel, out)

        def branch(own: jax.Array) -> Callable[[jax.Array], jax.Array]:
            return lambda x: product(equation, x, own, multiply=multiply, out=out)

        return lax.switch(kernel.index, [branch(own) for own in kernel.kernels], x)
    if multiply is None or jnp.dtype(multiply) == x.dtype:
        return jnp.einsum(
            equation, x, kernel, precision=_exact(x.dtype), preferred_element_type=out
        )
    result = _rounded(equation, jnp.dtype(multiply), x, kernel)
    return result.astype(x.dtype if out is None else out)


_FEW_ROWS = 2, 7
"""For so many rows of float32, `_product_by_columns` is the faster one on CPUs."""


def _product_by_columns(
    x: Float[Array, "*B D"], kernel: ChosenKernel, out: Any
) -> Float[Array, "*B F"]:
    """The same product with x stored by columns, for which XLA's CPU backend has other code.

    That takes a quarter less time for three to five rows, and for two that are made three: it is
    Eigen's, which YNNPACK's replaced.
    """
    rows = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(rows, ((0, max(0, 3 - len(rows))), (0, 0)))
    columns = lax.optimization_barrier(padded.T)

    def branch(own: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda columns: lax.dot_general(
            columns,
            own,
            (((0,), (0,)), ((), ())),
            precision=_exact(x.dtype),
            preferred_element_type=out,
        )

    y = lax.switch(kernel.index, [branch(own) for own in kernel.kernels], columns)
    return y[: len(rows)].reshape(*x.shape[:-1], -1)


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
