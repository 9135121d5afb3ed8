"""RMS and layer norms over the last axis, computed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from specjax.models.cpu import library


def rms_norm(
    x: Float[Array, "B T *N D"], scale: Float[Array, "D"], eps: float
) -> Float[Array, "B T *N D"]:
    """Return `x` divided by its root mean square over the last axis, times `scale`.

    `eps` is added to the mean square (Zhang and Sennrich 1910.07467).
    """
    return _norm(x, scale, None, eps)


def layer_norm(
    x: Float[Array, "B T D"], scale: Float[Array, "D"], bias: Float[Array, "D"], eps: float
) -> Float[Array, "B T D"]:
    """Return the layer norm of `x`: over the last axis, mean 0 and variance 1, scaled and shifted.

    `eps` is added to the variance (Ba et al. 1607.06450).
    """
    return _norm(x, scale, bias, eps)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    if library.is_for(x.shape[1], x.dtype):
        return _cpu_norm(x, scale, bias, eps)
    return _xla_norm(x, scale, bias, eps)


def _xla_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    if bias is not None:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    out = wide.astype(x.dtype) * _last_axis(scale, x)
    return out if bias is None else out + _last_axis(bias, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _cpu_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Return the norm by a C++ kernel (`models/cpu`), whose rounding does not depend on T."""
    call = jax.ffi.ffi_call(
        library.NORM, jax.ShapeDtypeStruct(x.shape, jnp.float32), vmap_method="sequential"
    )
    vectors = [vector.astype(jnp.float32) for vector in (scale, bias) if vector is not None]
    return call(x, *vectors, epsilon=np.float32(eps))


@_cpu_norm.defjvp
def _cpu_norm_jvp(eps: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_xla_norm, eps=eps), primals, tangents)


def _last_axis(vector: Float[Array, "D"], x: jax.Array) -> jax.Array:
    return jnp.expand_dims(vector, tuple(range(x.ndim - 1))).astype(x.dtype)
