"""Mixtral (2401.04088): Mistral with experts in each layer.

llama.cpp writes it as `llama` with experts.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import DecoderConfig, Experts


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields, max_positions=131072, epsilon=1e-5)
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"], theta=1e6),
        "experts": Experts(
            num_experts=fields.integer("num_local_experts", 8),
            per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=sizes["intermediate_size"],
        ),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        "hidden_act": "silu",
        "sliding_window": None,
        "num_local_experts": None if experts is None else experts.num_experts,
        "num_experts_per_tok": None if experts is None else experts.per_token,
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys, experts=True)
    keys.only("attention.sliding_window", 0)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        "experts": gguf_keys.read_experts(keys, "softmax", sizes["intermediate_size"]),
    }


_NAMES = {name: text for name, text in common.NAMES.items() if name not in ("gate", "up", "down")}

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(
        _NAMES, names_of_experts=common.expert_names("block_sparse_moe", "w1", "w3", "w2")
    ),
    gguf=GgufLayout(
        "llama",
        _read_gguf,
        common.table(common.GGUF_NAMES, paired=True, names_of_experts=common.GGUF_EXPERT_NAMES),
        experts=True,
    ),
)
