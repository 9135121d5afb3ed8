"""Qwen2 and 2.5 (2407.10671), Qwen3 and its mixtures of experts (2505.09388), MiMo (2505.07608).

Qwen2 is Llama with biases of queries, keys and values; Qwen3 has an RMS norm of each head's queries
and keys instead, and MiMo is Qwen2 with modules for multi-token prediction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout, MtpLayout
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig


def _read_window(fields: Fields, known: Values) -> Values:
    """Return the sliding window of the layers from `max_window_layers` on, if windows are used."""
    used, first = fields.flag("use_sliding_window"), fields.integer("max_window_layers", 28)
    size, num_layers = schema.window_size(fields), known["num_layers"]
    windowed = [used and size is not None and layer >= first for layer in schema.layers(num_layers)]
    window = schema.read_window(fields, size if used else None, num_layers, windowed)
    return {"sliding_window": window}


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    used = config.sliding_window is not None
    fields = {"use_sliding_window": used, "max_window_layers": config.num_layers}
    return {**fields, **schema.write_window(config)}


_WINDOW = Part(_read_window, _write_window)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=(
        *schema.sizes(max_positions=32768),
        schema.rope(),
        schema.fixed({"attention_bias": True, "attention.output_bias": False}),
        _WINDOW,
        schema.SILU,
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout("qwen2", table("gguf")),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts=(
        *schema.sizes(head_dim=128, max_positions=32768),
        schema.rope(),
        schema.fixed({"attention.qk_norm": True}),
        schema.ATTENTION_BIAS,
        _WINDOW,
        schema.SILU,
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout("qwen3", table("gguf")),
)


def _ignore_window(fields: Fields, known: Values) -> Values:
    fields.get("sliding_window")  # of no effect without use_sliding_window
    return {}


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parts=(
        *schema.sizes(max_positions=32768),
        schema.rope(),
        schema.fixed({"attention.qk_norm": True}),
        schema.ATTENTION_BIAS,
        schema.constant("use_sliding_window", False),
        Part(_ignore_window, lambda _: {"sliding_window": None}),
        *schema.experts("num_experts", intermediate_size=768),
        # A GGUF does not say whether scores are divided by their sum; llama.cpp always does it.
        schema.flag("experts.normalize", "norm_topk_prob"),
        schema.SILU,
        schema.written({"decoder_sparse_step": 1, "mlp_only_layers": []}),
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout("qwen3moe", table("gguf"), experts=True),
)

MIMO = replace(
    QWEN2,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    gguf=None,
    mtp=MtpLayout(
        prefix="model.mtp_layers.{module}",
        names={
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "projection": "input_proj",
            "final_norm": "final_layernorm",
        },
        concat="hidden_first",
    ),
)
