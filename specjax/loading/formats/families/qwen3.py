"""Qwen3 (2505.09388): Llama with an RMS norm of each head's queries and keys."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.families.qwen2 import read_layers, write_layers
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig

_ATTENTION = Attention(qk_norm=True)


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields, head_dim=128, max_positions=32768)
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"]),
        "attention_bias": fields.flag("attention_bias"),
        "attention": _ATTENTION,
        "sliding_window": read_layers(fields, sizes["num_layers"]),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        **write_layers(config),
        "attention_bias": config.attention_bias,
        "hidden_act": "silu",
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    keys.only("attention.sliding_window", 0)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "attention": _ATTENTION,
    }


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES | common.QK_NORM_NAMES),
    gguf=GgufLayout(
        "qwen3", _read_gguf, common.table(common.GGUF_NAMES | common.GGUF_QK_NORM_NAMES)
    ),
)
