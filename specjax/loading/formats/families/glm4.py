"""GLM-4 of 2025 (`glm4`): norms after too, half of each head rotated, neighbours as pairs."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, Norm

_FUSED = (("gate", "up"),)
_NORM = Norm(after=True)


def _attention(rotary_width: int) -> Attention:
    return Attention(output_bias=False, rotary_width=rotary_width)


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields, max_positions=131072, epsilon=1.5625e-7)
    rope = common.read_one_rope(fields, sizes["max_positions"], partial=0.5)
    return {
        **sizes,
        "attention_bias": fields.flag("attention_bias", True),
        "attention": _attention(int(sizes["head_dim"] * rope.pop("partial"))),
        "norm": _NORM,
        **rope,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    partial = config.rotary_width / config.head_dim
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config, partial_rotary_factor=partial),
        "partial_rotary_factor": partial,
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    rotary_width = keys.whole("rope.dimension_count", sizes["head_dim"])
    return {
        **sizes,
        **gguf_keys.read_rope(keys, rotary_width),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "attention": _attention(rotary_width),
        "norm": _NORM,
    }


_NAMES = common.NAMES | {
    "gate": "model.layers.{layer}.mlp.gate_up_proj",
    "up": "model.layers.{layer}.mlp.gate_up_proj",
    "after_attention_norm": "model.layers.{layer}.post_self_attn_layernorm",
    "after_mlp_norm": "model.layers.{layer}.post_mlp_layernorm",
}
_GGUF_NAMES = common.GGUF_NAMES | {
    "gate": "blk.{layer}.ffn_up",
    "after_attention_norm": "blk.{layer}.post_attention_norm",
    "after_mlp_norm": "blk.{layer}.post_ffw_norm",
}

FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(_NAMES, paired=True, fused=_FUSED),
    gguf=GgufLayout("glm4", _read_gguf, common.table(_GGUF_NAMES, paired=True, fused=_FUSED)),
)
