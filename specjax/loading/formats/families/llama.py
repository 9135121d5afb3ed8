"""Llama (Touvron et al. 2302.13971) and models with its architecture, such as SmolLM2.

Mistral (2310.06825) is Llama with a sliding window in early versions, and Mixtral (2401.04088) is
Mistral with experts in each layer. llama.cpp writes all of them as `llama`, without windows.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig, SlidingWindow

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts=(
        *schema.sizes(),
        schema.rope(),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        schema.SILU,
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout("llama", table("gguf", paired=True)),
)


def _read_window(fields: Fields, known: Values) -> Values:
    size = schema.window_size(fields)
    return {"sliding_window": None if size is None else SlidingWindow(size)}


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_window
    return {"sliding_window": None if window is None else window.size}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    parts=(
        *schema.sizes(max_positions=131072),
        schema.rope(),
        Part(_read_window, _write_window),
        schema.SILU,
    ),
    tensors=table("huggingface"),
)

_EXPERTS = "block_sparse_moe.experts.{expert}"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        *schema.sizes(max_positions=131072, epsilon=1e-5),
        schema.rope(theta=1e6),
        schema.integer("experts.num_experts", "num_local_experts", "expert_count", 8),
        schema.integer("experts.per_token", "num_experts_per_tok", "expert_used_count", 2),
        schema.computed("experts.intermediate_size", lambda known: known["intermediate_size"]),
        schema.SILU,
        schema.written({"sliding_window": None}),
    ),
    tensors=table(
        "huggingface",
        {
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.gate": f"{_EXPERTS}.w1",
            "mlp.experts.up": f"{_EXPERTS}.w3",
            "mlp.experts.down": f"{_EXPERTS}.w2",
        },
    ),
    gguf=GgufLayout("llama", table("gguf", paired=True), experts=True),
)
