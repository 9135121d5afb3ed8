"""GLM-4 of 2025 (`glm4`), and GLM-4.5 to 4.7 (2508.06471), which have experts.

Half of each head is rotated. `glm4` stores rotated dimensions as adjacent pairs, and adds norms
after attention and MLP. `glm4_moe` selects experts by sigmoid scores, after some dense layers, and
adds a shared expert.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout, MtpLayout
from specjax.loading.formats.gguf_fields import MTP_MODULES, GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_FUSED = (("mlp.gate", "mlp.up"),)

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    parts=(
        *schema.sizes(max_positions=131072, epsilon=1.5625e-7),
        schema.rope(partial=0.5),
        schema.flag(
            "attention_bias", "attention_bias", schema.has_tensor("blk.0.attn_q.bias"), True
        ),
        schema.fixed({"attention.output_bias": False, "norm.after": True}),
        schema.SILU,
    ),
    tensors=table(
        "huggingface",
        {
            "mlp.gate": "mlp.gate_up_proj",
            "mlp.up": "mlp.gate_up_proj",
            "after_attention_norm": "post_self_attn_layernorm",
            "after_mlp_norm": "post_mlp_layernorm",
        },
        paired=True,
        fused=_FUSED,
    ),
    gguf=GgufLayout("glm4", table("gguf", {"mlp.gate": "ffn_up"}, paired=True, fused=_FUSED)),
)


def _read_shared(fields: Fields, known: Values) -> Values:
    width = known["experts.intermediate_size"]
    return {"experts.shared_size": width * fields.integer("n_shared_experts", 1)}


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    if (experts := config.experts) is None:
        return {}
    return {"n_shared_experts": experts.shared_size // experts.intermediate_size}


def _read_gguf_rest(fields: GgufFields, known: Values) -> Values:
    """Return the fields that GGUF files count or scale differently than config.json."""
    width = known["experts.intermediate_size"]
    return {
        "experts.shared_size": width * fields.integer("expert_shared_count"),
        # Modules for multi-token prediction are counted among the layers.
        "num_layers": known["num_layers"] - fields.integer(MTP_MODULES, 0),
        # A scale of 0 means none.
        "experts.scale": known["experts.scale"] or 1.0,
    }


SHARED = Part(_read_shared, _write_shared, _read_gguf_rest)
"""The width of the MLP that all tokens use, as a multiple of that of an expert."""
MTP = MtpLayout(
    prefix="model.layers.{layer}",
    names={
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "projection": "eh_proj",
        "final_norm": "shared_head.norm",
    },
    copies={"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
)

GGUF_MTP = MtpLayout(
    prefix="blk.{layer}",
    names={
        "embedding_norm": "nextn.enorm",
        "hidden_norm": "nextn.hnorm",
        "projection": "nextn.eh_proj",
        "final_norm": "nextn.shared_head_norm",
    },
    copies={"nextn.embed_tokens": "token_embd", "nextn.shared_head_head": "output"},
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    parts=(
        *schema.sizes(max_positions=131072, epsilon=1e-5),
        schema.rope(partial=0.5),
        schema.ATTENTION_BIAS,
        schema.flag(
            "attention.qk_norm", "use_qk_norm", schema.has_tensor("blk.0.attn_q_norm.weight")
        ),
        schema.fixed(
            {
                "attention.output_bias": False,
                "experts.router": "sigmoid",
                "experts.selection_bias": True,
            }
        ),
        *schema.experts("n_routed_experts", intermediate_size=1408),
        # Defaults for fields missing in a GGUF are llama.cpp's.
        schema.flag("experts.normalize", "norm_topk_prob", "expert_weights_norm", True, False),
        schema.number("experts.scale", "routed_scaling_factor", "expert_weights_scale", 1.0, 0.0),
        schema.integer("experts.groups", "n_group", "expert_group_count", 1, 1),
        schema.integer("experts.groups_per_token", "topk_group", "expert_group_used_count", 1, 1),
        schema.integer(
            "experts.num_dense", "first_k_dense_replace", "leading_dense_block_count", 1, 0
        ),
        SHARED,
        schema.SILU,
        schema.written({"num_nextn_predict_layers": 0}),
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout(
        "glm4moe",
        table("gguf", {"mlp_norm": "post_attention_norm"}),
        fixed={"expert_gating_func": 2},
        experts=True,
        mtp=GGUF_MTP,
    ),
    mtp=MTP,
)
