"""Qwen3-Next and Qwen3.5: gated delta rules, and every fourth layer gated attention.

Attention has a gate per head, rotates a quarter of each head, and norms multiply by 1 + scale.
"""

from __future__ import annotations

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, MtpLayout

_FUSED = (("recurrence.query", "recurrence.key", "recurrence.value"),)
_PARTS = (
    *schema.sizes(head_dim=256, max_positions=32768),
    schema.rope(partial=0.25),
    schema.fixed({"norm.offset": 1, "attention.qk_norm": True, "attention.gated": True}),
    schema.flag("attention_bias", "attention_bias"),
    recurrent.layer_types(recurrent.LINEAR, recurrent.every(4)),
    *recurrent.delta_rule(),
    schema.SILU,
    schema.constant("attn_output_gate", True),
    schema.constant("mamba_ssm_dtype", "float32"),
)
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

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    parts=_PARTS,
    tensors=table("huggingface", fused=_FUSED),
    mtp=_MTP,
)
