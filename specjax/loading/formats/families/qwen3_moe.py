"""Qwen3's mixtures of experts (2505.09388): Qwen3 with experts in each layer."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, Experts

_ATTENTION = Attention(qk_norm=True)


def _read(fields: Fields) -> dict[str, Any]:
    fields.only("use_sliding_window", False)
    fields.get("sliding_window")  # of no effect then
    sizes = common.read_sizes(fields, max_positions=32768)
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"]),
        "attention_bias": fields.flag("attention_bias"),
        "attention": _ATTENTION,
        "experts": Experts(
            num_experts=common.count_experts(fields, "num_experts"),
            per_token=fields.integer("num_experts_per_tok", 8),
            intermediate_size=fields.integer("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob"),
        ),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    written = {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "use_sliding_window": False,
        "sliding_window": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if (experts := config.experts) is not None:
        written |= {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalize,
        }
    return written


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys, experts=True)
    keys.only("attention.sliding_window", 0)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "attention": _ATTENTION,
        # The file does not say whether scores are divided by their sum; llama.cpp always does it.
        "experts": gguf_keys.read_experts(keys, "softmax"),
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(
        common.NAMES | common.QK_NORM_NAMES,
        names_of_experts=common.expert_names("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    gguf=GgufLayout(
        "qwen3moe",
        _read_gguf,
        common.table(
            common.GGUF_NAMES | common.GGUF_QK_NORM_NAMES,
            names_of_experts=common.GGUF_EXPERT_NAMES,
        ),
        experts=True,
    ),
)
