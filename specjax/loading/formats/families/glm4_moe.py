"""GLM-4.5 to 4.7 (2508.06471): experts by sigmoids after some dense layers, a shared expert."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, MtpLayout
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, Experts


def _read(fields: Fields) -> dict[str, Any]:
    fields.only("hidden_act", "silu")
    fields.get("output_router_logits")
    sizes = common.read_sizes(fields, max_positions=131072, epsilon=1e-5)
    rope = common.read_one_rope(fields, sizes["max_positions"], partial=0.5)
    width = fields.integer("moe_intermediate_size", 1408)
    return {
        **sizes,
        "attention_bias": fields.flag("attention_bias"),
        "attention": Attention(
            output_bias=False,
            qk_norm=fields.flag("use_qk_norm"),
            rotary_width=int(sizes["head_dim"] * rope.pop("partial")),
        ),
        **rope,
        "experts": Experts(
            num_experts=fields.integer("n_routed_experts", fields.get("num_local_experts") or 128),
            per_token=fields.integer("num_experts_per_tok", 8),
            intermediate_size=width,
            router="sigmoid",
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
            selection_bias=True,
            groups=fields.integer("n_group", 1),
            groups_per_token=fields.integer("topk_group", 1),
            shared_size=width * fields.integer("n_shared_experts", 1),
            num_dense=fields.integer("first_k_dense_replace", 1),
        ),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    partial = config.rotary_width / config.head_dim
    written = {
        **common.write_sizes(config),
        **common.write_one_rope(config, partial_rotary_factor=partial),
        "partial_rotary_factor": partial,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.attention.qk_norm,
        "num_nextn_predict_layers": 0,
    }
    if (experts := config.experts) is not None:
        written |= {
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalize,
            "routed_scaling_factor": experts.scale,
            "n_group": experts.groups,
            "topk_group": experts.groups_per_token,
            "n_shared_experts": experts.shared_size // experts.intermediate_size,
            "first_k_dense_replace": experts.num_dense,
        }
    return written


_BLOCK = "model.layers.{layer}.mlp"
_SHARED = {
    ("shared", part, "kernel"): f"{_BLOCK}.shared_experts.{part}_proj.weight"
    for part in ("gate", "up", "down")
}
_BIAS = {("router", "selection_bias"): f"{_BLOCK}.gate.e_score_correction_bias"}

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(
        common.NAMES | common.QK_NORM_NAMES,
        names_of_experts=common.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
        | _SHARED
        | _BIAS,
    ),
    mtp=MtpLayout(
        prefix="model.layers.{layer}",
        names={
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "projection": "eh_proj",
            "final_norm": "shared_head.norm",
        },
        copies={"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
    ),
)
