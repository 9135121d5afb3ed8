"""Storage formats of cached keys and values: the model's dtype, bfloat16, or 8-bit integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Int8, Shaped

_LARGEST = 127
_SMALLEST_EXPONENT = -126


@struct.dataclass
class Int8Entries:
    """Keys or values [L, B, G, S, C] stored as int8 times one power of two per token and head.

    Products with powers of two are exact in every floating-point dtype, and rounding twice changes
    nothing, so that a token has the same keys in the window and in the cache.
    """

    integers: Int8[Array, "*N C"]
    exponents: Int8[Array, "*N 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys or values."""
        return self.integers.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the integers."""
        return self.integers.dtype


Entries = Shaped[Array, "*N C"] | Int8Entries
"""Keys or values, as a floating-point array or as scaled integers."""


def relative_step(dtype: jnp.dtype) -> float:
    """Return the relative rounding step of a dtype.

    For a floating-point dtype it is the distance from 1 to the next larger number; for int8, the
    step divided by the largest number.
    """
    return 2.0**-7 if dtype == jnp.int8 else float(jnp.finfo(dtype).eps)


def empty_entries(shape: tuple[int, ...], dtype: jnp.dtype) -> Entries:
    """Return keys or values of the given shape that are all zero, stored as `dtype`.

    They are an array, or for int8 `Int8Entries`.
    """
    zeros = jnp.zeros(shape, dtype)
    return Int8Entries(zeros, zeros[..., :1]) if dtype == jnp.int8 else zeros


def encode(entries: Float[Array, "*N C"], dtype: jnp.dtype) -> Entries:
    """Return keys or values stored as `dtype`: an array, or for int8 `Int8Entries`."""
    if dtype != jnp.int8:
        return entries.astype(dtype)
    entries = entries.astype(jnp.float32)
    fraction, exponents = jnp.frexp(jnp.abs(entries).max(axis=-1, keepdims=True))
    # The least power of two whose 127-fold is no smaller than the largest magnitude.
    exponents += jnp.where(fraction > _LARGEST / 128, -6, -7)
    exponents = jnp.clip(exponents, _SMALLEST_EXPONENT, _LARGEST)
    integers = jnp.round(entries / powers_of_two(exponents)).astype(jnp.int8)
    return Int8Entries(integers, exponents.astype(jnp.int8))


def decode(entries: Entries, dtype: jnp.dtype) -> Float[Array, "*N C"]:
    """Return stored keys or values as an array of the floating-point type `dtype`."""
    if not isinstance(entries, Int8Entries):
        return entries.astype(dtype)
    numbers = entries.integers.astype(jnp.float32) * powers_of_two(entries.exponents)
    return numbers.astype(dtype)


def powers_of_two(exponents: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """Return 2**exponent exactly; exponents are from -126 to 127."""
    bits = (exponents.astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
