"""Gemma 2 (2408.00118): norms of 1 + scale before and after, soft caps, alternating windows."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import (
    Attention,
    DecoderConfig,
    Embedding,
    Mlp,
    Norm,
    SlidingWindow,
)

_ACTIVATION = "gelu_pytorch_tanh"
_SIZE_OF_27B = 46
"""Layers of the 27B model, whose query scale GGUF does not state."""

NAMES = {
    "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "after_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "after_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
"""Names in which Gemma differs from Llama in Hugging Face's layout."""

GGUF_NAMES = {
    "after_attention_norm": "blk.{layer}.post_attention_norm",
    "after_mlp_norm": "blk.{layer}.post_ffw_norm",
}


def read_shared(fields: Fields, max_positions: int) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common, but for rotary bases and windows."""
    # `hidden_act` is a leftover that transformers does not read.
    fields.get("hidden_act")
    sizes = common.read_sizes(fields, head_dim=256, max_positions=max_positions, tied=True)
    return {
        **sizes,
        **shared(sizes["hidden_size"]),
        "attention_bias": fields.flag("attention_bias"),
    }


def shared(hidden_size: int) -> dict[str, Any]:
    """The structure that Gemma 2 and 3 have in common."""
    return {
        "norm": Norm(offset=1, after=True),
        "mlp": Mlp("gelu_tanh"),
        "embedding": Embedding(scale=hidden_size**0.5),
    }


def query_scale(fields: Fields) -> float:
    """1/sqrt(query_pre_attn_scalar)."""
    scalar = fields.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise fields.fail("query_pre_attn_scalar", "must be a positive number; repair config.json")
    return scalar**-0.5


def write_shared(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `read_shared` and `query_scale` read, and the soft caps."""
    scale, window = config.attention.query_scale, config.sliding_window
    scalar = config.head_dim if scale is None else scale**-2
    if round(scalar) ** -0.5 == scale:
        scalar = round(scalar)
    return {
        **common.write_sizes(config),
        "attention_bias": config.attention_bias,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": config.attention.softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": None if window is None else window.size,
        "layer_types": common.layer_types(config),
    }


def _read(fields: Fields) -> dict[str, Any]:
    read = read_shared(fields, 8192)
    num_layers = read["num_layers"]
    size = fields.integer("sliding_window", 4096)
    alternating = [layer % 2 == 0 for layer in common.layers(num_layers)]
    return {
        **read,
        **common.read_full_rope(fields, read["max_positions"]),
        "attention": Attention(
            query_scale=query_scale(fields),
            softcap=fields.optional_number("attn_logit_softcapping", 50.0),
        ),
        "logit_softcap": fields.optional_number("final_logit_softcapping", 30.0),
        "sliding_window": common.read_window(fields, size, num_layers, alternating),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {**write_shared(config), **common.write_one_rope(config)}


def gguf_query_scale(sizes: dict[str, Any], layers_of_27b: int) -> float:
    """The scale of queries, which llama.cpp knows by the model's size."""
    if sizes["num_layers"] == layers_of_27b:
        return (sizes["hidden_size"] // max(sizes["num_heads"], 1)) ** -0.5
    return sizes["head_dim"] ** -0.5


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    window = keys.whole("attention.sliding_window", 4096)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        **shared(sizes["hidden_size"]),
        "attention": Attention(
            query_scale=gguf_query_scale(sizes, _SIZE_OF_27B),
            softcap=keys.real("attn_logit_softcapping", 50.0),
        ),
        "logit_softcap": keys.real("final_logit_softcapping", 30.0),
        "sliding_window": SlidingWindow(window, (True, False)) if window else None,
    }


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES | NAMES),
    gguf=GgufLayout(
        "gemma2", _read_gguf, common.table(common.GGUF_NAMES | GGUF_NAMES, norms_added=1)
    ),
)
