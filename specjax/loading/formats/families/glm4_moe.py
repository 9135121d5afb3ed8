"""GLM-4.5 to 4.7 (2508.06471): experts by sigmoids after some dense layers, a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout, MtpLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, Experts


def _read(fields: Fields) -> dict[str, Any]:
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
            num_experts=common.count_experts(fields, "n_routed_experts"),
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


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys, experts=True)
    # Modules for multi-token prediction are counted among the layers.
    sizes["num_layers"] -= keys.whole(gguf_keys.MTP_MODULES, 0)
    rotary_width = keys.whole("rope.dimension_count", sizes["head_dim"])
    experts = gguf_keys.read_experts(keys, "sigmoid")
    return {
        **sizes,
        **gguf_keys.read_rope(keys, rotary_width),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "attention": Attention(
            output_bias=False,
            qk_norm="blk.0.attn_q_norm.weight" in keys.file.tensors,
            rotary_width=rotary_width,
        ),
        "experts": replace(
            experts,
            # What llama.cpp does where a file does not say it; a scale of 0 means none there.
            normalize=keys.get("expert_weights_norm", (bool,), False),
            scale=keys.real("expert_weights_scale", 0.0) or 1.0,
            selection_bias=True,
            groups=keys.whole("expert_group_count", 1),
            groups_per_token=keys.whole("expert_group_used_count", 1),
            shared_size=experts.intermediate_size * keys.whole("expert_shared_count"),
            num_dense=keys.whole("leading_dense_block_count", 0),
        ),
    }


_BLOCK = "model.layers.{layer}.mlp"
_SHARED = {
    ("shared", part, "kernel"): f"{_BLOCK}.shared_experts.{part}_proj.weight"
    for part in ("gate", "up", "down")
}
_BIAS = {("router", "selection_bias"): f"{_BLOCK}.gate.e_score_correction_bias"}

_GGUF_NAMES = (
    common.GGUF_NAMES | common.GGUF_QK_NORM_NAMES | {"mlp_norm": "blk.{layer}.post_attention_norm"}
)
_GGUF_SHARED = {
    ("shared", part, "kernel"): f"blk.{{layer}}.ffn_{part}_shexp.weight"
    for part in ("gate", "up", "down")
}
_GGUF_BIAS = {("router", "selection_bias"): "blk.{layer}.exp_probs_b.bias"}

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
    gguf=GgufLayout(
        "glm4moe",
        _read_gguf,
        common.table(
            _GGUF_NAMES, names_of_experts=common.GGUF_EXPERT_NAMES | _GGUF_SHARED | _GGUF_BIAS
        ),
        experts=True,
        mtp=MtpLayout(
            prefix="blk.{layer}",
            names={
                "embedding_norm": "nextn.enorm",
                "hidden_norm": "nextn.hnorm",
                "projection": "nextn.eh_proj",
                "final_norm": "nextn.shared_head_norm",
            },
            copies={"nextn.embed_tokens": "token_embd", "nextn.shared_head_head": "output"},
        ),
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
