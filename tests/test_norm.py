"""Norms by the kernel in C++ and by XLA: values, derivatives, bits."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.cpu import library
from specjax.models.layers.norm import layer_norm, rms_norm

needs_library = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
EPS = 1e-5


def arrays(*shape, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + 0.3
    scale, bias = (rng.standard_normal(shape[-1]) for _ in range(2))
    return tuple(jnp.asarray(array, jnp.float32) for array in (x, scale, bias))


@needs_library
@pytest.mark.parametrize("shape", [(2, 3, 20), (1, 1, 64), (1, 9, 2, 12), (2, 70, 16)])
def test_values_are_those_of_the_formula(shape):
    x, scale, bias = arrays(*shape)
    wide = np.asarray(x, np.float64)
    wanted = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + EPS) * np.asarray(scale)
    np.testing.assert_allclose(
        jax.jit(rms_norm, static_argnums=2)(x, scale, EPS), wanted, rtol=2e-6
    )
    if len(shape) == 3:
        centred = wide - wide.mean(-1, keepdims=True)
        wanted = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + EPS)
        wanted = wanted * np.asarray(scale) + np.asarray(bias)
        np.testing.assert_allclose(layer_norm(x, scale, bias, EPS), wanted, rtol=1e-5, atol=1e-5)


@needs_library
def test_a_row_has_the_same_bits_whatever_the_number_of_tokens():
    x, scale, bias = arrays(1, 64, 576)
    for norm in (lambda x: rms_norm(x, scale, EPS), lambda x: layer_norm(x, scale, bias, EPS)):
        together = jax.jit(norm)(x)
        for tokens in (1, 5, 8, 33):
            np.testing.assert_array_equal(jax.jit(norm)(x[:, :tokens]), together[:, :tokens])


@needs_library
def test_derivatives_are_those_of_the_formula(monkeypatch):
    x, scale, bias = arrays(2, 3, 16)

    def loss(x, scale, bias):
        return jnp.sum(jnp.sin(layer_norm(x, scale, bias, EPS) + rms_norm(x, scale, EPS)))

    gradients = jax.grad(loss, argnums=(0, 1, 2))(x, scale, bias)
    monkeypatch.setattr(library, "is_for", lambda tokens, dtype: False)
    wanted = jax.grad(loss, argnums=(0, 1, 2))(x, scale, bias)
    for found, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)
