"""gpt-oss (OpenAI 2025, 2508.10925): experts with biases, learned attention sinks, YaRN.

Every other layer has a window. Experts are published in MXFP4, with gate and up interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.typed_fields import Fields

_THETA, _LIMIT = 150000.0, 7.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary scaling of a config.json that states none."""
_ROPE = schema.rope(theta=_THETA, gguf_theta=_THETA)


def _read_rope(fields: Fields, known: Values) -> Values:
    stated = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = fields if stated else Fields(fields.where, {**fields.values, "rope_parameters": _YARN})
    values = _ROPE.read(rope, known)
    fields.asked |= rope.asked
    if (scaling := values["rope_scaling"]) is not None:
        fields.only("initial_context_length", scaling.original_max_positions)
    return values


def _read_gguf_rope(fields: GgufFields, known: Values) -> Values:
    """Return the rope; files do not say that the bounds of YaRN are not rounded."""
    values = _ROPE.read_gguf(fields, known)
    scaling = values["rope_scaling"]
    return {**values, "rope_scaling": scaling and replace(scaling, truncate=False)}


def _read_quantisation(fields: Fields, known: Values) -> Values:
    """Accept experts in MXFP4, which are dequantised when they are read."""
    fields.section("quantization_config").only("quant_method", "mxfp4")
    return {}


def _experts(name: str, *parts: str) -> list[TensorEntry]:
    """Return the entries of a tensor of all experts, which combines `parts`, and of its bias."""
    file, tree = f"model.layers.{{layer}}.mlp.experts.{name}", ("layers", "mlp", "experts")
    fused = parts if len(parts) > 1 else ()
    shared = {"fused": fused, "interleaved": bool(fused), "merged": True}
    return [
        TensorEntry(file + suffix, (*tree, part, leaf), transposed=leaf == "kernel", **shared)
        for part in parts
        for suffix, leaf in (("", "kernel"), ("_bias", "bias"))
    ]


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        *schema.sizes(head_dim=64, max_positions=131072, epsilon=1e-5),
        Part(_read_rope, _ROPE.write, _read_gguf_rope),
        schema.flag(
            "attention_bias", "attention_bias", schema.has_tensor("blk.0.attn_q.bias"), True
        ),
        schema.alternating_window(128),
        schema.integer("experts.num_experts", "num_local_experts", "expert_count", 128),
        schema.integer("experts.per_token", "num_experts_per_tok", "expert_used_count", 4),
        schema.integer(
            "experts.intermediate_size", "intermediate_size", "expert_feed_forward_length"
        ),
        schema.fixed(
            {
                "attention.sink_logits": True,
                "experts.bias": True,
                "mlp.activation": "gelu_sigmoid",
                "mlp.offset": 1,
            }
        ),
        schema.number("mlp.limit", "swiglu_limit", lambda _: _LIMIT, _LIMIT),
        schema.constant("swiglu_alpha", 1.702),
        schema.constant("hidden_act", "silu"),
        Part(_read_quantisation),
    ),
    tensors=(
        *table(
            "huggingface",
            {"mlp.router": "mlp.router"}
            | {f"mlp.experts.{part}": "" for part in ("gate", "up", "down")},
        ),
        *_experts("gate_up_proj", "gate", "up"),
        *_experts("down_proj", "down"),
    ),
    gguf=GgufLayout("gpt-oss", table("gguf", {"mlp_norm": "post_attention_norm"}), experts=True),
    mxfp4=True,
)
