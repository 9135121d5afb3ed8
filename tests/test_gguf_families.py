"""GGUF files of each architecture: names and layouts as the gguf package has them, and errors."""

import dataclasses

import gguf_files
import jax
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.loading.formats import tensor_layout
from specjax.loading.formats.families import registry
from specjax.loading.load import load_model, random_model
from specjax.models.config import (
    Attention,
    DecoderConfig,
    Embedding,
    Experts,
    Mlp,
    Norm,
    RopeScaling,
    SlidingWindow,
)

BASE = DecoderConfig(
    vocab_size=len(gguf_files.TOKENS),
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
    "mixtral": {"experts": Experts(5, 2, 40)},
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
    "mixtral": {"expert_count": np.uint32(5), "expert_used_count": np.uint32(2)},
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
"""Keys beside those that every architecture has."""


def config_of(name):
    return dataclasses.replace(BASE, **CONFIGS[name], family=name)


def metadata(config):
    """The keys of a file as llama.cpp's converter writes them."""
    architecture = registry.family(config.family).gguf.architecture
    keys = {
        key.replace("llama.", f"{architecture}."): value
        for key, value in gguf_files.metadata(config).items()
    }
    if config.norm.kind == "layer":
        epsilon = keys.pop(f"{architecture}.attention.layer_norm_rms_epsilon")
        keys[f"{architecture}.attention.layer_norm_epsilon"] = epsilon
        del keys[f"{architecture}.rope.freq_base"]
    more = KEYS.get(config.family, {})
    return keys | {f"{architecture}.{key}": value for key, value in more.items()}


def write(path, config, arrays=None, change=(), kind="F32"):
    """A model's file, with other keys, None for one that is left out."""
    family = registry.family(config.family)
    if arrays is None:
        params = random_model(config, 0, dtype="float32").params
        arrays = tensor_layout.stored_tensors(family.gguf.tensors, config, params)
    keys = metadata(config) | dict(change)
    keys = {key: value for key, value in keys.items() if value is not None}
    return gguf_files.write(path, keys, arrays, kind, family.gguf.architecture)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_model_is_loaded(tmp_path, name):
    """The file has the names and rows of the gguf package's own map from Hugging Face's names."""
    config = config_of(name)
    model = random_model(config, 0, dtype="float32")
    family = registry.family(name)
    arrays = tensor_layout.stored_tensors(family.gguf.tensors, config, model.params)
    theirs = tensor_layout.stored_tensors(family.tensors, config, model.params)
    expected = gguf_files.converted(theirs, family.gguf.architecture, config)
    assert arrays.keys() == expected.keys()
    for stored, value in expected.items():
        np.testing.assert_array_equal(arrays[stored], value)
    again = load_model(write(tmp_path / "a.gguf", config, arrays), dtype="float32")
    assert again.config == config
    for mine, read in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(again.params), strict=True
    ):
        np.testing.assert_allclose(read, mine, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3", {"qwen3.expert_count": np.uint32(8)}, "qwen3.expert_count=8"),
        ("qwen3", {"qwen3.surprise": np.uint32(1)}, "qwen3.surprise=1: is unknown"),
        ("qwen3", {"qwen3.rope.scaling.type": "yarn"}, "qwen3.rope.scaling.type='yarn'"),
        ("qwen2", {"qwen2.attention.sliding_window": np.uint32(5)}, "sliding_window=5"),
        ("gemma2", {"gemma2.attn_logit_softcapping": np.float32(-1)}, "attention.softcap=-1"),
        ("glm4", {"glm4.rope.dimension_count": np.uint32(16)}, "rotary_width=16"),
        ("gpt2", {"gpt2.use_parallel_residual": True}, "use_parallel_residual=True"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, name, change, words):
    path = write(tmp_path / "a.gguf", config_of(name), change=change)
    with pytest.raises(InputError, match=words) as error:
        load_model(path)
    assert "\n" not in str(error.value)
