"""Qwen3-Next and Qwen3.5: gated delta rules, and every fourth layer gated attention.

Attention has a gate per head, rotates a quarter of each head, and norms multiply by 1 + scale.
Qwen3-Next and some of Qwen3.5 have experts, and a shared one with a gate.
"""

from __future__ import annotations

from dataclasses import replace

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.schema import Part
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, MtpLayout

_FUSED = (("recurrence.query", "recurrence.key", "recurrence.value"),)
_SIZES = schema.sizes(head_dim=256, max_positions=32768)
_LAYERS = (
    schema.rope(partial=0.25),
    schema.fixed({"norm.offset": 1, "attention.qk_norm": True, "attention.gated": True}),
    schema.flag("attention_bias", "attention_bias"),
    recurrent.layer_types(recurrent.LINEAR, recurrent.every(4)),
    schema.unread("full_attention_interval"),
    *recurrent.delta_rule(),
    schema.SILU,
    schema.constant("attn_output_gate", True),
    schema.constant("mamba_ssm_dtype", "float32"),
)


def _experts(count: int, per_token: int) -> tuple[Part, ...]:
    """Return the parts for experts, by default `count` of them, of which a token uses some."""
    return (
        schema.integer("experts.num_experts", "num_experts", default=count),
        schema.integer("experts.per_token", "num_experts_per_tok", default=per_token),
        schema.integer("experts.intermediate_size", "moe_intermediate_size", default=512),
        schema.integer("experts.shared_size", "shared_expert_intermediate_size", default=512),
        schema.fixed({"experts.shared_gate": True}),
        schema.written({"decoder_sparse_step": 1, "mlp_only_layers": []}),
    )


_OF_SHARED = {
    f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
_OF_KEY_HEADS = {
    f"recurrence.{part}": "" for part in ("query", "key", "value", "gate", "share", "decay")
} | {"recurrence.qkvz": "linear_attn.in_proj_qkvz", "recurrence.rates": "linear_attn.in_proj_ba"}
"""The projections of Qwen3-Next, which have the outputs of each key head side by side."""
_MTP = MtpLayout(
    prefix="mtp",
    layer=".layers.0",
    names={
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "final_norm": "norm",
    },
    zero_first_embedding=False,
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    parts=(
        *_SIZES,
        *_LAYERS,
        *_experts(512, 10),
        schema.flag("experts.normalize", "norm_topk_prob", default=True),
    ),
    tensors=table("huggingface", _OF_SHARED | _OF_KEY_HEADS),
    mtp=replace(_MTP, unannounced=True),
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    parts=(*_SIZES, *_LAYERS),
    tensors=table("huggingface", fused=_FUSED),
    mtp=_MTP,
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    parts=(
        *_SIZES[:1],
        schema.integer(
            "intermediate_size", ("intermediate_size", "moe_intermediate_size"), default=512
        ),
        *_SIZES[2:],
        *_LAYERS,
        *_experts(256, 8),
    ),
    tensors=table("huggingface", _OF_SHARED, fused=_FUSED),
    mtp=_MTP,
)
