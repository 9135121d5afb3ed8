"""gpt-oss beyond the goldens of families: MXFP4, sinks, and experts with biases on a mesh."""

import dataclasses
import functools
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import GOLDENS, changed, refusal
from tiny_models import noisy

from specjax.distributed import sharding
from specjax.loading.formats import mxfp4
from specjax.loading.load import load_model, place_model, random_model, save_model
from specjax.models.layers.attention import attend, with_sinks
from specjax.models.parameter_table import parameter_table

MXFP4 = "variants/gpt_oss"
DOWN = "model.layers.0.mlp.experts.down_proj"


def test_all_bytes_have_the_numbers_of_llama_cpps_type():
    rng = np.random.default_rng(0)
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    scales = rng.integers(100, 140, (1, 16)).astype(np.uint8)
    # llama.cpp has the first half of a group in the lower bits, the second in the higher ones.
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(16, 32)
    theirs = np.concatenate([scales.T, codes[:, :16] | codes[:, 16:] << 4], axis=1)
    kind = gguf.GGMLQuantizationType.MXFP4
    wanted = gguf.quants.dequantize(theirs.astype(np.uint8), kind)
    np.testing.assert_array_equal(mxfp4.dequantised(blocks, scales), wanted.reshape(1, -1))


def test_a_model_in_mxfp4_is_saved_in_floats(tmp_path, caplog):
    model = load_model(GOLDENS / MXFP4, dtype="float32")
    (line,) = [line for line in caplog.messages if "MXFP4" in line]
    assert "the kernels of experts are in MXFP4 (4 tensors) and are dequantised" in line
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float32")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda old: {f"{DOWN}_scales": None}, f"{DOWN}_scales is missing; download"),
        (
            lambda old: {f"{DOWN}_scales": old[f"{DOWN}_scales"][:, :16]},
            r"down_proj_scales \[6, 16, 1\] are not the two parts of a tensor in MXFP4",
        ),
        (
            lambda old: {"model.layers.0.self_attn.q_proj.weight": np.zeros((64, 32), np.uint8)},
            "self_attn.q_proj.weight has the type U8, which is not supported",
        ),
    ],
)
def test_tensors_that_are_no_mxfp4_are_refused(change, said, tmp_path):
    def tensors(old):
        both = {**old, **change(old)}
        return {name: value for name, value in both.items() if value is not None}

    assert re.search(said, refusal(changed(MXFP4, tmp_path, tensors)))


def test_a_sink_is_a_key_whose_value_is_zero():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    # Three tokens, two heads of queries for each of two of keys.
    query, key, value, sinks = normal(1, 2, 6, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(4)
    seen = jnp.asarray(rng.random((1, 1, 6, 5)) < 0.6)
    mixed = with_sinks(attend(query, key, value, seen), sinks)
    scores = jnp.where(seen, jnp.einsum("bgxc,bgyc->bgxy", query, key), -jnp.inf)
    of_query = sinks[np.array([[0, 1] * 3, [2, 3] * 3])][None, :, :, None]
    weights = jax.nn.softmax(jnp.concatenate([scores, of_query], axis=-1), axis=-1)
    wanted = jnp.einsum("bgxy,bgyc->bgxc", weights[..., :-1], value)
    np.testing.assert_allclose(mixed.weighted / mixed.denominator, wanted, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(decoder, params, tokens):
    """Logits of decoding, and of training's form."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    cache, window = decoder.make_cache(batch, 128), decoder.make_window(batch, length)
    decoded = decoder.extend(params, tokens, positions, cache, window, 0, causal)
    return decoded.logits, decoder.extend(params, tokens, positions, None, None, 0, causal).logits


@pytest.mark.parametrize("num_experts", [6, 5])
def test_devices_hold_whole_experts_or_a_part_of_each_with_their_biases(num_experts):
    config = load_model(GOLDENS / MXFP4, dtype="float32").config
    experts = dataclasses.replace(config.experts, num_experts=num_experts)
    model = random_model(dataclasses.replace(config, experts=experts), 0, dtype="float32")
    # Random models have biases of 0.
    params = noisy(parameter_table(model.config), 0, 0.3)
    model = dataclasses.replace(model, params=params)
    tokens = jnp.arange(24).reshape(2, 12)
    wanted = logits_of(model.architecture, model.params, tokens)
    np.testing.assert_allclose(*wanted, atol=1e-4)
    placed = place_model(model, sharding.make_mesh(1, 2, jax.devices()[:2]))
    with sharding.use(placed.mesh):
        got = logits_of(placed.architecture, placed.params, tokens)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), got, wanted)
