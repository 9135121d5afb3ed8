"""LFM2 (Liquid AI 2025): gated short convolutions, and a few layers of attention."""

from __future__ import annotations

import math
from typing import Any

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig


def _read_width(fields: Fields, known: Values) -> Values:
    """Return the width of the MLP, which is computed from the stated one unless that is exact."""
    name = "block_ff_dim" if fields.get("block_ff_dim") is not None else "intermediate_size"
    width = fields.count(name, 12288)
    multiple, factor = fields.count("block_multiple_of", 256), "block_ffn_dim_multiplier"
    times = fields.optional_number(factor, 1.0)
    if fields.flag("block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        if times is not None:
            width = -(-int(times * width) // multiple) * multiple
    return {"intermediate_size": width}


def _write_width(config: DecoderConfig) -> dict[str, Any]:
    return {"intermediate_size": config.intermediate_size, "block_auto_adjust_ff_dim": False}


def _read_tied(fields: Fields, known: Values) -> Values:
    tied = fields.flag("tie_word_embeddings", True)
    return {"tie_word_embeddings": fields.flag("tie_embedding", tied)}


def _read_gguf_tied(fields: GgufFields, known: Values) -> Values:
    return {"tie_word_embeddings": "output.weight" not in fields.file.tensors}


def _read_gguf_width(fields: GgufFields, known: Values) -> Values:
    return {"intermediate_size": fields.integer("feed_forward_length")}


def _write_tied(config: DecoderConfig) -> dict[str, Any]:
    return {"tie_word_embeddings": config.tie_word_embeddings}


def _default_layers(fields: Fields, num_layers: int) -> list[bool]:
    attention = fields.integers("full_attn_idxs")
    if attention is None:
        return [False] * num_layers
    return [layer not in attention for layer in schema.layers(num_layers)]


def _parts_of_channels(known: Values) -> int:
    """Return into how many parts channels are divided, so that a mesh splits them as heads."""
    return math.gcd(known["num_heads"], known["hidden_size"])


def _check_sizes(fields: Fields, known: Values) -> Values:
    """Raise InputError for widths that differ from the model's, and for another rotary base."""
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.only(name, known["hidden_size"])
    fields.only("num_heads", known["num_heads"])
    fields.only("theta", known["rope_theta"])
    return {}


_NOT_READ = (
    *("intermediate_size", "full_attn_idxs", "block_norm_eps"),
    *("block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_use_xavier_init"),
)
"""Fields that say how the model was initialised, or of no effect where another states the same."""


def _check_head(fields: GgufFields, known: Values) -> Values:
    fields.only("attention.key_length", known["head_dim"])
    return {}


def _has_bias(fields: GgufFields) -> bool:
    return any(name.endswith(".shortconv.conv.bias") for name in fields.file.tensors)


_GATED = ("recurrence.before", "recurrence.after", "recurrence.value")
"""The modules of the projection into a convolution, which is one tensor, in order."""
_EPSILON = "attention.layer_norm_rms_epsilon"

LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    parts=(
        schema.integer("hidden_size", "hidden_size", "embedding_length"),
        Part(_read_width, _write_width, _read_gguf_width),
        schema.integer("num_layers", "num_hidden_layers", "block_count"),
        schema.integer("num_heads", "num_attention_heads", "attention.head_count"),
        schema.integer("num_kv_heads", "num_key_value_heads", recurrent.kv_heads, schema.heads),
        schema.computed("head_dim", schema.width_of_head),
        Part(read_gguf=_check_head),
        schema.integer("max_positions", "max_position_embeddings", "context_length", 128000),
        schema.number("rms_norm_eps", ("norm_eps", "block_norm_eps"), _EPSILON, 1e-5),
        Part(_read_tied, _write_tied, _read_gguf_tied),
        schema.rope(theta=1e6),
        schema.fixed({"attention.qk_norm": True, "recurrence.kind": "conv"}),
        recurrent.layer_types("conv", _default_layers, read_gguf=recurrent.by_kv_heads),
        schema.integer("recurrence.conv_width", "conv_L_cache", "shortconv.l_cache", 3),
        schema.computed("recurrence.value_heads", _parts_of_channels),
        schema.computed(
            "recurrence.value_width",
            lambda known: known["hidden_size"] // known["recurrence.value_heads"],
        ),
        schema.flag("recurrence.conv_bias", "conv_bias", _has_bias),
        schema.computed("recurrence.bias", lambda known: known["recurrence.conv_bias"]),
        Part(_check_sizes),
        schema.unread(*_NOT_READ),
        schema.constant("use_pos_enc", True),
        schema.constant("block_use_swiglu", True),
    ),
    tensors=table(
        "huggingface",
        {
            "final_norm": "model.embedding_norm",
            "attention_norm": "operator_norm",
            "mlp_norm": "ffn_norm",
            "mlp.gate": "feed_forward.w1",
            "mlp.up": "feed_forward.w3",
            "mlp.down": "feed_forward.w2",
            "attention.query_norm": "self_attn.q_layernorm",
            "attention.key_norm": "self_attn.k_layernorm",
            "attention.output": "self_attn.out_proj",
            **dict.fromkeys(_GATED, "conv.in_proj"),
            "recurrence.taps.value": "conv.conv.weight",
            "recurrence.taps_bias.value": "conv.conv.bias",
            "recurrence.output": "conv.out_proj",
        },
        fused=(_GATED,),
    ),
    gguf=GgufLayout(
        "lfm2",
        table(
            "gguf",
            {
                "final_norm": "token_embd_norm",
                **dict.fromkeys(_GATED, "shortconv.in_proj"),
                "recurrence.taps.value": "shortconv.conv.weight",
                "recurrence.taps_bias.value": "shortconv.conv.bias",
                "recurrence.output": "shortconv.out_proj",
            },
            fused=(_GATED,),
        ),
    ),
)
