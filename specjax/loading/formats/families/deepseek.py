"""DeepSeek-V2 (2405.04434) and V3 (2412.19437), and models of their layouts, such as Moonlight.

They have latent attention, and experts with shared ones after some dense layers. V2 selects experts
by softmax scores; V3 by sigmoid scores with a bias, as GLM-4.5 does, and it has modules for
multi-token prediction.
"""

from __future__ import annotations

import math
from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.glm import MTP, SHARED
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family
from specjax.loading.formats.huggingface_rope import yarn_attention_factor
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig, Latent

_RANK, _ROPE, _ALL = "q_lora_rank", schema.rope(), "mscale_all_dim"


def _read_latent(fields: Fields, known: Values) -> Values:
    """Return the sizes of latent attention; `head_dim` of a file is that of rotated dimensions."""
    rotated = fields.count("qk_rope_head_dim", 64)
    width = rotated + fields.count("qk_nope_head_dim", 128)
    fields.only("head_dim", rotated)
    fields.only("qk_head_dim", width)
    fields.only("num_key_value_heads", known["num_heads"])
    direct = _RANK in fields.values and fields.get(_RANK) is None
    latent = Latent(
        fields.count("kv_lora_rank", 512),
        None if direct else fields.count(_RANK, 1536),
        fields.count("v_head_dim", 128),
        fields.flag("rope_interleave", True),
    )
    return {"head_dim": width, "attention.rotary_width": rotated, "attention.latent": latent}


def _write_latent(config: DecoderConfig) -> dict[str, Any]:
    latent, rotated = config.attention.latent, config.rotary_width
    if latent is None:
        return {}
    return {
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": config.head_dim - rotated,
        "v_head_dim": latent.value_dim,
        "kv_lora_rank": latent.kv_rank,
        _RANK: latent.query_rank,
        "rope_interleave": latent.paired,
    }


def _read_rope(fields: Fields, known: Values) -> Values:
    """Return the rope and the scale of scores, which YaRN's `mscale_all_dim` multiplies."""
    values = _ROPE.read(fields, known)
    scaling, scale = values["rope_scaling"], None
    for name in ("rope_parameters", "rope_scaling"):
        all_dims = fields.section(name).number(_ALL, 0)
        if scaling is not None and all_dims:
            if scaling.kind != "yarn":
                raise fields.fail(name, f"{_ALL} is supported with the rope_type yarn only")
            factor = yarn_attention_factor(scaling.factor, all_dims)
            scale = known["head_dim"] ** -0.5 * factor * factor
    return {**values, "attention.query_scale": scale}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    written, scale = dict(_ROPE.write(config)), config.attention.query_scale
    scaling = config.rope_scaling
    if scale is not None and scaling is not None and scaling.factor > 1:
        factor = math.sqrt(scale * math.sqrt(config.head_dim))
        all_dims = round((factor - 1) / (yarn_attention_factor(scaling.factor) - 1), 9)
        for name in ("rope_parameters", "rope_scaling"):
            written[name] = {**written[name], _ALL: all_dims}
    return written


def _parts(*, dense: int) -> tuple[Part, ...]:
    """Return the parts of both versions; `dense` is the default number of dense layers."""
    return (
        *schema.sizes(max_positions=4096),
        Part(_read_latent, _write_latent),
        Part(_read_rope, _write_rope),
        schema.ATTENTION_BIAS,
        *schema.experts("n_routed_experts", intermediate_size=2048),
        schema.integer("experts.num_dense", "first_k_dense_replace", default=dense),
        SHARED,
        schema.SILU,
    )


_LIMITED = "group_limited_greedy"


def _read_groups(fields: Fields, known: Values) -> Values:
    """Return the groups, which V2 compares by their best expert, if it is said to use them."""
    fields.only("topk_method", "greedy", _LIMITED)
    groups, used = fields.get("n_group"), fields.get("topk_group")
    if fields.get("topk_method") != _LIMITED or groups is None or used is None:
        return {"experts.group_scores": 1}
    return {
        "experts.group_scores": 1,
        "experts.groups": fields.count("n_group"),
        "experts.groups_per_token": fields.count("topk_group"),
    }


def _write_groups(config: DecoderConfig) -> dict[str, Any]:
    if (experts := config.experts) is None:
        return {}
    return {
        "topk_method": _LIMITED if experts.groups > 1 else "greedy",
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
    }


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parts=(
        *_parts(dense=0),
        schema.MLP_BIAS,
        schema.fixed({"experts.normalize": False}),
        schema.constant("norm_topk_prob", False),
        schema.number("experts.scale", "routed_scaling_factor", default=1.0),
        Part(_read_groups, _write_groups),
    ),
    tensors=table("huggingface"),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    parts=(
        *_parts(dense=3),
        schema.fixed({"experts.router": "sigmoid", "experts.selection_bias": True}),
        schema.flag("experts.normalize", "norm_topk_prob", default=True),
        schema.number("experts.scale", "routed_scaling_factor", default=2.5),
        schema.integer("experts.groups", "n_group", default=8),
        schema.integer("experts.groups_per_token", "topk_group", default=4),
        schema.written({"num_nextn_predict_layers": 0}),
    ),
    tensors=table("huggingface"),
    mtp=MTP,
)
