"""GGUF files of each architecture: names and layouts as the gguf package has them, and errors."""

import dataclasses
import json
import math
import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from model_files import GGUF_TOKENS, gguf_converted, gguf_metadata, refusal, write_gguf
from safetensors.numpy import load_file, save_file
from tiny_models import noisy

import specjax
from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.loading.formats import mtp_layers, parameter_names, tensor_layout
from specjax.loading.formats.families import registry
from specjax.loading.formats.huggingface_rope import yarn_attention_factor
from specjax.loading.load import load_model, random_model, save_model
from specjax.loading.quantize import float_model, is_quantized
from specjax.models.config import (
    Attention,
    DecoderConfig,
    Embedding,
    Experts,
    Mlp,
    Norm,
    Recurrence,
    RopeScaling,
    SlidingWindow,
)
from specjax.models.form import Form

BASE = DecoderConfig(
    vocab_size=len(GGUF_TOKENS),
    hidden_size=32,
    intermediate_size=40,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_positions=128,
    rope_theta=500.0,
)
GEMMA = {
    "norm": Norm(offset=1, after=True),
    "mlp": Mlp("gelu_tanh"),
    "embedding": Embedding(scale=32**0.5),
    "tie_word_embeddings": True,
}
DELTA = Recurrence("delta", key_heads=2, value_heads=4, key_width=8, value_width=6)
QWEN = {
    "norm": Norm(offset=1),
    "attention": Attention(qk_norm=True, gated=True, rotary_width=6),
    "mixers": ("recurrent", "recurrent", "recurrent", "attention"),
}
MAMBA = Recurrence(
    "mamba2", key_heads=2, value_heads=4, key_width=8, value_width=16, conv_bias=True
)
CONFIGS = {
    "qwen2": {"attention_bias": True, "attention": Attention(output_bias=False)},
    "qwen3": {"attention": Attention(qk_norm=True), "tie_word_embeddings": True},
    "gemma2": GEMMA
    | {
        "attention": Attention(query_scale=12**-0.5, softcap=5.0),
        "sliding_window": SlidingWindow(7, (True, False)),
        "logit_softcap": 3.0,
    },
    "gemma3_text": GEMMA
    | {
        "attention": Attention(qk_norm=True, query_scale=12**-0.5),
        "sliding_window": SlidingWindow(7, (True, True, False), 100.0),
        "rope_scaling": RopeScaling("linear", factor=2.0),
    },
    "gpt2": {
        "norm": Norm("layer"),
        "attention": Attention(rotary_width=0),
        "attention_bias": True,
        "mlp": Mlp("gelu_tanh", gated=False),
        "mlp_bias": True,
        "embedding": Embedding(positions=True),
        "num_kv_heads": 4,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "glm4": {
        "norm": Norm(after=True),
        "attention_bias": True,
        "attention": Attention(output_bias=False, rotary_width=6),
    },
    "smollm3": {
        "attention": Attention(unrotated=(False, False, False, True)),
        "tie_word_embeddings": True,
    },
    "olmo2": {
        "norm": Norm(after=True, before=False),
        "attention": Attention(qk_norm=True, qk_norm_over="projection"),
    },
    "olmo3": {
        "norm": Norm(after=True, before=False),
        "attention": Attention(qk_norm=True, qk_norm_over="projection"),
        "sliding_window": SlidingWindow(7, (True, True, False), 500.0),
        "rope_scaling": RopeScaling(
            "yarn",
            factor=4.0,
            original_max_positions=32,
            attention_factor=yarn_attention_factor(4.0),
        ),
    },
    "granite": {
        "embedding": Embedding(scale=12.0),
        "attention": Attention(query_scale=0.015625),
        "residual_scale": 0.22,
        "logit_divisor": 8.0,
    },
    "phi3": {"attention": Attention(rotary_width=6), "sliding_window": SlidingWindow(7)},
    "mixtral": {"experts": Experts(5, 2, 40)},
    "gpt_oss": {
        "attention_bias": True,
        "attention": Attention(sink_logits=True),
        "sliding_window": SlidingWindow(7, (True, False)),
        "mlp": Mlp("gelu_sigmoid", limit=7.0, offset=1),
        "experts": Experts(5, 2, 40, bias=True),
        "rope_scaling": RopeScaling(
            "yarn",
            factor=4.0,
            original_max_positions=32,
            attention_factor=yarn_attention_factor(4.0),
            truncate=False,
        ),
    },
    "qwen3_moe": {"attention": Attention(qk_norm=True), "experts": Experts(6, 3, 8)},
    "glm4_moe": {
        "attention_bias": True,
        "attention": Attention(output_bias=False, qk_norm=True, rotary_width=6),
        "experts": Experts(
            8,
            2,
            12,
            router="sigmoid",
            scale=1.7,
            selection_bias=True,
            groups=4,
            groups_per_token=2,
            shared_size=24,
            num_dense=1,
        ),
    },
}
CONFIGS |= {
    "qwen3_next": QWEN
    | {
        "recurrence": DELTA,
        "experts": Experts(6, 3, 8, shared_size=20, shared_gate=True),
    },
    "qwen3_5_text": QWEN | {"recurrence": DELTA},
    "qwen3_5_moe_text": QWEN
    | {
        "recurrence": dataclasses.replace(DELTA, value_heads=6),
        "experts": Experts(6, 3, 8, shared_size=20, shared_gate=True),
    },
    "lfm2": {
        "head_dim": 8,
        "attention": Attention(qk_norm=True),
        "recurrence": Recurrence("conv", conv_width=3, value_heads=4, value_width=8),
        "mixers": ("recurrent", "attention", "recurrent"),
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "embedding": Embedding(scale=12.0),
        "attention": Attention(query_scale=0.015625, rotary_width=0),
        "residual_scale": 0.22,
        "logit_divisor": 8.0,
        "recurrence": MAMBA,
        "mixers": ("recurrent", "attention", "recurrent"),
        "experts": Experts(6, 3, 8, shared_size=40),
    },
    "nemotron_h": {
        "rope_theta": 10000.0,
        "attention": Attention(rotary_width=0),
        "mlp": Mlp("relu2", gated=False),
        "recurrence": MAMBA,
        "mixers": ("recurrent", "absent", "attention", "absent"),
        "mlps": (False, True),
    },
}
SSM = {
    "ssm.conv_kernel": np.uint32(4),
    "ssm.group_count": np.uint32(2),
    "ssm.time_step_rank": np.uint32(4),
    "ssm.state_size": np.uint32(8),
    "ssm.inner_size": np.uint32(64),
}
KEYS = {
    "gemma2": {
        "attention.sliding_window": np.uint32(7),
        "attn_logit_softcapping": np.float32(5),
        "final_logit_softcapping": np.float32(3),
    },
    "gemma3_text": {
        "attention.sliding_window": np.uint32(7),
        "attention.sliding_window_pattern": np.uint32(3),
        "rope.freq_base_swa": np.float32(100),
        "rope.scaling.type": "linear",
        "rope.scaling.factor": np.float32(2),
    },
    "glm4": {"rope.dimension_count": np.uint32(6)},
    "phi3": {
        "rope.dimension_count": np.uint32(6),
        "attention.sliding_window": np.uint32(7),
    },
    "olmo3": {
        "attention.sliding_window": np.uint32(7),
        "attention.sliding_window_pattern": [True, True, False, True],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": np.float32(4),
        "rope.scaling.original_context_length": np.uint32(32),
        "rope.scaling.yarn_attn_factor": np.float32(yarn_attention_factor(4.0)),
    },
    "granite": {
        "embedding_scale": np.float32(12),
        "attention.scale": np.float32(0.015625),
        "residual_scale": np.float32(0.22),
        "logit_scale": np.float32(8),
    },
    "mixtral": {"expert_count": np.uint32(5), "expert_used_count": np.uint32(2)},
    "gpt_oss": {
        "attention.sliding_window": np.uint32(7),
        "expert_count": np.uint32(5),
        "expert_used_count": np.uint32(2),
        "expert_feed_forward_length": np.uint32(40),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": np.float32(4),
        "rope.scaling.original_context_length": np.uint32(32),
    },
    "qwen3_moe": {
        "expert_count": np.uint32(6),
        "expert_used_count": np.uint32(3),
        "expert_feed_forward_length": np.uint32(8),
    },
    "glm4_moe": {
        "rope.dimension_count": np.uint32(6),
        "expert_count": np.uint32(8),
        "expert_used_count": np.uint32(2),
        "expert_feed_forward_length": np.uint32(12),
        "expert_shared_count": np.uint32(2),
        "expert_gating_func": np.uint32(2),
        "expert_weights_scale": np.float32(1.7),
        "expert_weights_norm": True,
        "expert_group_count": np.uint32(4),
        "expert_group_used_count": np.uint32(2),
        "leading_dense_block_count": np.uint32(1),
    },
}
KEYS |= {
    "qwen3_next": {
        "rope.dimension_count": np.uint32(6),
        "ssm.conv_kernel": np.uint32(4),
        "ssm.group_count": np.uint32(2),
        "ssm.time_step_rank": np.uint32(4),
        "ssm.state_size": np.uint32(8),
        "ssm.inner_size": np.uint32(24),
        "expert_count": np.uint32(6),
        "expert_used_count": np.uint32(3),
        "expert_feed_forward_length": np.uint32(8),
        "expert_shared_feed_forward_length": np.uint32(20),
    },
    "lfm2": {
        "attention.head_count_kv": [0, 2, 0, 0],
        "shortconv.l_cache": np.uint32(3),
    },
    "granitemoehybrid": {
        "embedding_scale": np.float32(12),
        "attention.scale": np.float32(0.015625),
        "residual_scale": np.float32(0.22),
        "logit_scale": np.float32(8),
        "attention.head_count_kv": [0, 2, 0, 0],
        "rope.scaling.finetuned": False,
        "feed_forward_length": np.uint32(8),
        "expert_count": np.uint32(6),
        "expert_used_count": np.uint32(3),
        "expert_shared_feed_forward_length": np.uint32(40),
        **SSM,
    },
    "nemotron_h": {
        "attention.head_count_kv": [0, 0, 2, 0],
        "feed_forward_length": [0, 40, 0, 40],
        "attention.layer_norm_epsilon": np.float32(1e-5),
        "rope.dimension_count": np.uint32(12),
        **SSM,
    },
}
KEYS["qwen3_5_text"] = {
    name: value for name, value in KEYS["qwen3_next"].items() if "expert" not in name
} | {"rope.dimension_sections": [1, 1, 1, 0]}
KEYS["qwen3_5_moe_text"] = KEYS["qwen3_next"] | {
    "ssm.time_step_rank": np.uint32(6),
    "ssm.inner_size": np.uint32(36),
    "full_attention_interval": np.uint32(4),
}
"""Keys beside those that every architecture has."""


def config_of(name):
    return dataclasses.replace(BASE, **CONFIGS[name], family=name)


def metadata(config):
    """The keys of a file as llama.cpp's converter writes them."""
    architecture = registry.family(config.family).gguf.architecture
    keys = {
        key.replace("llama.", f"{architecture}."): value
        for key, value in gguf_metadata(config).items()
    }
    if config.norm.kind == "layer":
        epsilon = keys.pop(f"{architecture}.attention.layer_norm_rms_epsilon")
        keys[f"{architecture}.attention.layer_norm_epsilon"] = epsilon
        del keys[f"{architecture}.rope.freq_base"]
    more = KEYS.get(config.family, {})
    return keys | {f"{architecture}.{key}": value for key, value in more.items()}


GLM = config_of("glm4_moe")


def tensors_of(config, seed=0):
    """A random model's tensors as its file has them."""
    params = random_model(config, seed, dtype="float32").params
    return tensor_layout.stored_tensors(registry.family(config.family).gguf.tensors, config, params)


def write(path, config, arrays=None, change=(), kind="F32", kinds=None):
    """A model's file, with other keys, None for one that is left out."""
    family = registry.family(config.family)
    arrays = tensors_of(config) if arrays is None else arrays
    keys = metadata(config) | dict(change)
    keys = {key: value for key, value in keys.items() if value is not None}
    return write_gguf(path, keys, arrays, kind, family.gguf.architecture, kinds)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_model_is_loaded(tmp_path, name):
    """The file has the names and rows of the gguf package's own map from Hugging Face's names."""
    config = config_of(name)
    model = random_model(config, 0, dtype="float32")
    family = registry.family(name)
    arrays = tensor_layout.stored_tensors(family.gguf.tensors, config, model.params)
    theirs = tensor_layout.stored_tensors(family.tensors, config, model.params)
    expected = gguf_converted(theirs, family.gguf.architecture, config)
    assert arrays.keys() == expected.keys()
    for stored, value in expected.items():
        np.testing.assert_array_equal(arrays[stored].reshape(value.shape), value)
    again = load_model(write(tmp_path / "a.gguf", config, expected), dtype="float32")
    assert again.config == config
    for mine, read in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_allclose(read, mine, rtol=0, atol=1e-6)


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def test_factors_of_long_and_short_contexts_are_read(tmp_path):
    scaling = RopeScaling(
        "factors",
        factors=(1.0, 2.0, 3.5),
        short_factors=(1.0, 1.1, 1.2),
        original_max_positions=32,
        attention_factor=1.18,
    )
    config = dataclasses.replace(config_of("phi3"), rope_scaling=scaling)
    keys = {
        "phi3.rope.scaling.original_context_length": np.uint32(32),
        "phi3.rope.scaling.attn_factor": np.float32(1.18),
        "phi3.attention.sliding_window": np.uint32(128),
    }
    arrays = tensors_of(config)
    factors = {
        LONG: np.array(scaling.factors, np.float32),
        SHORT: np.array(scaling.short_factors, np.float32),
    }
    model = load_model(write(tmp_path / "a.gguf", config, arrays | factors, keys), dtype="float32")
    assert model.config == dataclasses.replace(config, sliding_window=None)
    with pytest.raises(InputError, match=f"{SHORT} is missing"):
        load_model(write(tmp_path / "b.gguf", config, arrays | {LONG: factors[LONG]}, keys))
    path = write(tmp_path / "c.gguf", config, arrays | factors | {LONG: factors[LONG][:2]}, keys)
    with pytest.raises(InputError, match=r"rope_factors_long.weight \[2\] is not supported"):
        load_model(path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_fused_projections_in_blocks_are_those_of_the_dequantised_file(tmp_path):
    config = dataclasses.replace(config_of("phi3"), head_dim=16, intermediate_size=64)
    keys = {"phi3.attention.key_length": np.uint32(16)}
    path = write(tmp_path / "a.gguf", config, change=keys, kind="Q8_0")
    model, wide = load_model(path), load_model(path, weights="float", form=Form())
    layers = model.params["layers"]
    assert is_quantized(layers["attention"]["qkv"]["kernel"])
    assert is_quantized(layers["mlp"]["gate_up"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, float_model(model).params, wide.params)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["qwen3_5_moe_text", *slow("qwen3_next", "granitemoehybrid")])
def test_recurrent_layers_in_blocks_are_those_of_the_dequantised_file(tmp_path, name):
    recurrence = {"key_width": 16, "value_width": 16}
    config = config_of(name)
    config = dataclasses.replace(
        config,
        head_dim=16,
        intermediate_size=64,
        recurrence=dataclasses.replace(config.recurrence, **recurrence),
        experts=dataclasses.replace(config.experts, intermediate_size=32, shared_size=64),
    )
    architecture = registry.family(name).gguf.architecture
    keys = {
        "attention.key_length": 16,
        "ssm.state_size": 16,
        "ssm.inner_size": config.recurrence.value_heads * 16,
        "expert_feed_forward_length": 32,
        "feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
    }
    known = {*KEYS[name], "attention.key_length"}
    keys = {f"{architecture}.{key}": np.uint32(keys[key]) for key in known & keys.keys()}
    kinds = {
        tensor: "F32"
        for tensor in tensors_of(config)
        if "ssm_conv1d" in tensor or "shexp" in tensor
    }
    path = write(tmp_path / "a.gguf", config, change=keys, kind="Q8_0", kinds=kinds)
    model, wide = load_model(path), load_model(path, weights="float", form=Form())
    recurrent = model.params["recurrent_layers"]["recurrence"]
    joined = "value_gate_decay" if name == "granitemoehybrid" else "qkvz"
    assert is_quantized(recurrent[joined]["kernel"])
    # In Qwen3.5's files the value heads, which are its inputs, have another order.
    assert is_quantized(recurrent["output"]["kernel"]) == (name != "qwen3_5_moe_text")
    jax.tree.map(np.testing.assert_array_equal, float_model(model).params, wide.params)
    found, wanted = (
        specjax.generate(one, ["the thin", "in the"], drafter="ngram", max_new_tokens=12).token_ids
        for one in (model, wide)
    )
    assert found == wanted


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", *slow("nemotron_h", "lfm2")])
def test_recurrent_layers_are_read_for_a_mesh(tmp_path, name):
    path = write(tmp_path / "a.gguf", config_of(name))
    mesh = sharding.make_mesh(2, 2, jax.devices()[:4])
    placed, plain = (load_model(path, dtype="float32", mesh=one) for one in (mesh, None))
    jax.tree.map(np.testing.assert_array_equal, placed.params, plain.params)


def test_modules_of_qwen_are_among_the_layers(tmp_path):
    """With llama.cpp's names, and norms that multiply by the file's numbers."""
    config, family = config_of("qwen3_5_text"), registry.family("qwen3_5_text")
    modules = mtp_layers.module_config(config, 1, family.gguf.mtp)
    assert modules == mtp_layers.module_config(config, 1, family.mtp)
    params = noisy(modules.parameter_table(), 1, 1.0)
    arrays = tensors_of(config)
    layout = family.gguf
    for location in mtp_layers.locations(config, modules, layout.mtp, layout.tensors):
        path, index = location.within(scan_layers=True)
        value = np.asarray(parameter_names.lookup({"mtp": params}, path))[index]
        arrays[location.name] = np.ascontiguousarray(tensor_layout.to_stored(value, location))
    assert {name for name in arrays if "blk.4" in name and "nextn" in name} == {
        f"blk.4.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    }
    final = params["modules"]["0"]["final_norm"]["scale"]
    np.testing.assert_allclose(arrays["blk.4.nextn.shared_head_norm.weight"], final + 1, rtol=1e-6)
    keys = {"qwen35.block_count": np.uint32(5), "qwen35.nextn_predict_layers": np.uint32(1)}
    model = load_model(write(tmp_path / "a.gguf", config, arrays, keys), dtype="float32")
    assert model.config == config
    jax.tree.map(
        lambda mine, read: np.testing.assert_allclose(read, mine, rtol=0, atol=1e-6),
        params,
        model.mtp.params,
    )


def test_granite_4_with_attention_alone_is_read_as_granite_3(tmp_path):
    """llama.cpp's converter writes it so, with the sizes of the layers that it has not."""
    keys = SSM | {"feed_forward_length": np.uint32(8), "expert_used_count": np.uint32(0)}
    keys |= {"expert_shared_feed_forward_length": np.uint32(40)}
    keys = {f"granite.{name}": value for name, value in keys.items()}
    config = config_of("granite")
    assert load_model(write(tmp_path / "a.gguf", config, change=keys)).config == config


def test_granite_4_without_experts(tmp_path):
    config = dataclasses.replace(config_of("granitemoehybrid"), experts=None)
    keys = {"expert_count": 0, "expert_used_count": 0, "feed_forward_length": 40}
    keys = {f"granitehybrid.{name}": np.uint32(value) for name, value in keys.items()}
    path = write(tmp_path / "a.gguf", config, change=keys)
    assert load_model(path, dtype="float32").config == config


@pytest.mark.parametrize("how", ["stacked", *slow("unrolled", "mesh")])
def test_each_expert_is_dequantised_into_its_place(tmp_path, how):
    config = dataclasses.replace(
        config_of("mixtral"), head_dim=16, intermediate_size=64, experts=Experts(4, 2, 64)
    )
    arrays = tensors_of(config)
    path = tmp_path / "a.gguf"
    keys = {"llama.expert_count": np.uint32(4)}
    write(path, config, arrays, keys, kind="Q8_0")
    options = {
        "stacked": {},
        "unrolled": {"form": Form("unrolled")},
        "mesh": {"mesh": sharding.make_mesh(1, 2, jax.devices()[:2])},
    }[how]
    layers = load_model(path, dtype="float32", **options).params["layers"]
    kind = gguf.GGMLQuantizationType.Q8_0
    for layer in range(config.num_layers):
        stored = (arrays[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        gate, up, down = (
            gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind) for rows in stored
        )
        experts = (
            layers[str(layer)]["mlp"]["experts"]
            if how == "unrolled"
            else jax.tree.map(lambda leaf: leaf[layer], layers["mlp"]["experts"])  # noqa: B023
        )
        assert down.shape[0] == 4
        np.testing.assert_array_equal(experts["down"]["kernel"], down.swapaxes(1, 2))
        # In blocks of as many gates as heads and width share.
        block = 64 // math.gcd(64, config.num_heads)
        both = np.stack([part.reshape(4, -1, block, part.shape[-1]) for part in (gate, up)], axis=2)
        joined = both.reshape(4, 128, -1).swapaxes(1, 2)
        np.testing.assert_array_equal(experts["gate_up"]["kernel"], joined)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["Q8_0", *slow("Q4_1")])
def test_experts_in_blocks_are_those_of_the_dequantised_file(tmp_path, kind):
    config = dataclasses.replace(
        config_of("mixtral"), head_dim=16, intermediate_size=64, experts=Experts(4, 2, 64)
    )
    keys = {"llama.expert_count": np.uint32(4)}
    path = write(tmp_path / "a.gguf", config, change=keys, kind=kind)
    model, wide = load_model(path), load_model(path, weights="float", form=Form())
    kernels = model.params["layers"]["mlp"]["experts"]
    assert all(is_quantized(kernels[name]["kernel"]) for name in ("gate_up", "down"))
    jax.tree.map(np.testing.assert_array_equal, float_model(model).params, wide.params)
    prompts = ["the thin", "in the"]
    found, wanted = (
        specjax.generate(one, prompts, drafter="ngram", max_new_tokens=12).token_ids
        for one in (model, wide)
    )
    assert found == wanted


def test_keys_that_are_missing_mean_what_they_do_in_llama_cpp(tmp_path):
    """No division by the sum, no scale (nor by 0), no groups, no dense layers."""
    experts = dataclasses.replace(
        GLM.experts, normalize=False, scale=1.0, groups=1, groups_per_token=1, num_dense=0
    )
    config = dataclasses.replace(GLM, experts=experts)
    missing = (
        "expert_gating_func",
        "expert_weights_norm",
        "expert_group_count",
        "expert_group_used_count",
        "leading_dense_block_count",
    )
    change = {f"glm4moe.{name}": None for name in missing}
    change["glm4moe.expert_weights_scale"] = np.float32(0)
    assert load_model(write(tmp_path / "a.gguf", config, change=change)).config == config


@pytest.fixture(scope="module")
def announced(tmp_path_factory):
    """A directory of Hugging Face's layout with an MTP module, and its tensors."""
    folder = tmp_path_factory.mktemp("glm")
    family = registry.family("glm4_moe")
    save_model(random_model(GLM, 0, dtype="float32"), folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    modules = mtp_layers.module_config(GLM, 1, family.mtp)
    params = noisy(modules.parameter_table(), 1, 1.0)
    for location in mtp_layers.locations(GLM, modules, family.mtp, family.tensors):
        path, index = location.within(scan_layers=True)
        value = np.asarray(parameter_names.lookup({"mtp": params}, path))[index]
        tensors[location.name] = np.ascontiguousarray(tensor_layout.to_stored(value, location))
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"]
    (folder / "whole").mkdir()
    save_file(tensors, folder / "whole" / "model.safetensors")
    fields = json.loads((folder / "plain" / "config.json").read_text())
    text = json.dumps(fields | {"num_nextn_predict_layers": 1})
    (folder / "whole" / "config.json").write_text(text)
    return folder / "whole", gguf_converted(tensors, "glm4moe", GLM)


MODULES = {"glm4moe.block_count": np.uint32(5), "glm4moe.nextn_predict_layers": np.uint32(1)}


def module_layer(model):
    """The layer of its module."""
    return model.mtp.params["modules"]["0"]["layer"]


def test_modules_are_those_of_the_other_layout(announced, tmp_path):
    directory, arrays = announced
    theirs = load_model(directory, dtype="float32")
    mine = load_model(write(tmp_path / "a.gguf", GLM, arrays, MODULES), dtype="float32")
    assert mine.config == theirs.config == GLM
    assert mine.mtp.config == theirs.mtp.config
    jax.tree.map(np.testing.assert_array_equal, mine.arrays, theirs.arrays)
    half = load_model(tmp_path / "a.gguf", dtype="bfloat16")
    for one, other in (
        (half.params["layers"], mine.params["layers"]),
        (module_layer(half), module_layer(mine)),
    ):
        router, whole = one["mlp"]["router"], other["mlp"]["router"]
        assert router["kernel"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(router["selection_bias"], whole["selection_bias"])


def test_modules_are_whole_and_share_embedding_and_head(announced, tmp_path):
    _, arrays = announced
    name = "blk.4.nextn.shared_head_head.weight"
    with pytest.raises(InputError, match=f"{name} differs from output.weight"):
        load_model(write(tmp_path / "a.gguf", GLM, arrays | {name: arrays[name] + 1}, MODULES))
    without = {key: value for key, value in arrays.items() if key != "blk.4.nextn.eh_proj.weight"}
    with pytest.raises(InputError, match=r"missing: blk\.4\.nextn\.eh_proj\.weight\)"):
        load_model(write(tmp_path / "b.gguf", GLM, without, MODULES))
    with pytest.raises(InputError, match=r"unexpected: blk\.4\."):
        load_model(write(tmp_path / "c.gguf", GLM, arrays))


def test_modules_that_a_tool_dropped(announced, tmp_path, caplog):
    directory, arrays = announced
    without = {key: value for key, value in arrays.items() if not key.startswith("blk.4.")}
    path = write(tmp_path / "a.gguf", GLM, without, MODULES)
    model = load_model(path, dtype="float32")
    assert model.mtp is None
    (line,) = caplog.messages
    assert line.startswith(f"{path}: MTP modules are announced (1), and their tensors are not")
    theirs = load_model(directory, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, theirs.params)


def one_by_one(arrays):
    """As files were before llama.cpp merged experts."""
    merged = arrays.pop("blk.0.ffn_gate_exps.weight")
    return arrays | {
        f"blk.0.ffn_gate.{index}.weight": value.copy() for index, value in enumerate(merged)
    }


def without_up(arrays):
    return {name: value for name, value in arrays.items() if "ffn_up_exps" not in name}


def positive_decay(arrays):
    return arrays | {"blk.0.ssm_a": -arrays["blk.0.ssm_a"]}


def u32(name, value):
    return {name: np.uint32(value)}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", u32("expert_count", 8), "qwen3.expert_count=8"),
        ("qwen3", u32("surprise", 1), "qwen3.surprise=1: is unknown"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "qwen3.rope.scaling.type='longrope'"),
        (
            "qwen3",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": np.float32(0.1)},
            "yarn_log_multiplier=0.1: is not supported",
        ),
        ("qwen2", u32("attention.sliding_window", 5), "sliding_window=5"),
        ("gemma2", {"attn_logit_softcapping": np.float32(-1)}, "attention.softcap=-1"),
        ("glm4", u32("rope.dimension_count", 16), "rotary_width=16"),
        ("gpt2", {"use_parallel_residual": True}, "use_parallel_residual=True"),
        ("mixtral", one_by_one, "blk.0.ffn_gate.0.weight is of one expert"),
        ("mixtral", without_up, "missing: blk.0.ffn_up_exps.weight, blk.1"),
        ("mixtral", {"expert_count": None}, "unexpected: blk.0.ffn_down_exps.weight"),
        ("mixtral", u32("expert_count", 4), "mis-shaped"),
        ("mixtral", {"expert_weights_scale": np.float32(2)}, "is unknown"),
        (
            "olmo3",
            {"attention.sliding_window_pattern": [True, False]},
            "must be a list with an entry for 4 layers",
        ),
        ("olmo3", u32("attention.sliding_window", 0), "unknown (1 such in all: attention.sliding"),
        (
            "olmo3",
            {"rope.scaling.yarn_attn_factor": np.float32(3)},
            "yarn_attn_factor=3.0: is not supported; only 1.0 or 1.1386294 is",
        ),
        ("gpt_oss", u32("expert_feed_forward_length", 32), "mis-shaped: blk.0.ffn_down_exps."),
        ("smollm3", u32("attention.sliding_window", 7), "window=7: is not supported; only 0 is"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned=False: is not supported"),
        ("qwen3_next", u32("ssm.inner_size", 23), "must be a multiple of ssm.time_step_rank=4"),
        ("qwen3_next", u32("ssm.time_step_rank", 3), "recurrence.key_heads=2: must divide"),
        ("qwen3_next", u32("full_attention_interval", 2), "missing: blk.1."),
        ("qwen3_next", positive_decay, "blk.0.ssm_a must have negative numbers alone"),
        ("qwen3_5_text", u32("ssm.group_count", 4), "mis-shaped: blk.0."),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0]}, "an entry for each of 4 layers"),
        ("lfm2", {"attention.head_count_kv": [0.5, 2.0]}, "must be a list of whole numbers"),
        ("lfm2", u32("attention.key_length", 16), "key_length=16: is not supported; only 8 is"),
        ("granitemoehybrid", {"rope.scaling.finetuned": True}, "finetuned=True: is not supported"),
        ("nemotron_h", {"feed_forward_length": [0, 40, 0, 0]}, "missing: blk.3.ssm"),
        ("nemotron_h", u32("ssm.group_count", 3), "recurrence.key_heads=3: must divide"),
        ("qwen3_moe", u32("expert_gating_func", 2), "gating_func=2: is not supported; only 1 is"),
        ("qwen3_moe", u32("expert_count", 0), "experts.num_experts=0"),
        ("qwen3_moe", u32("expert_used_count", 7), "experts.per_token=7"),
        ("qwen3_moe", {"expert_feed_forward_length": None}, "length=None: must be"),
        ("qwen3_moe", u32("nextn_predict_layers", 1), "is unknown"),
        ("glm4_moe", u32("expert_gating_func", 3), "gating_func=3: is not supported; only 2 is"),
        ("glm4_moe", u32("expert_group_count", 3), "experts.groups=3"),
        ("glm4_moe", u32("nextn_predict_layers", 4), "num_layers=0"),
        ("glm4_moe", u32("nextn_predict_layers", 2), "missing: blk.2.nextn."),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, change, words):
    """Other metadata, or tensors that a function has changed."""
    config = config_of(name)
    arrays = tensors_of(config)
    if callable(change):
        arrays, change = change(arrays), {}
    architecture = registry.family(name).gguf.architecture
    keys = {f"{architecture}.{key}": value for key, value in change.items()}
    assert words in refusal(write(tmp_path / "a.gguf", config, arrays, keys))
