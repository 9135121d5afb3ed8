"""Llama (Touvron et al. 2302.13971), and models of its shape: SmolLM2, TinyLlama and others."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import DecoderConfig


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields)
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"]),
        "attention_bias": fields.flag("attention_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    keys.only("attention.sliding_window", 0)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.file.tensors,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES),
    gguf=GgufLayout("llama", _read_gguf, common.table(common.GGUF_NAMES, paired=True)),
)
