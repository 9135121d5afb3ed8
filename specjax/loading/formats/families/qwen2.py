"""Qwen2 and Qwen2.5 (2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, SlidingWindow

_ATTENTION = Attention(output_bias=False)


def read_layers(fields: Fields, num_layers: int) -> SlidingWindow | None:
    """The window of the layers from `max_window_layers` on, where `use_sliding_window` is set."""
    used, first = fields.flag("use_sliding_window"), fields.integer("max_window_layers", 28)
    size = None
    # Of a config without the field, transformers has 4096.
    if fields.get("sliding_window") is not None or "sliding_window" not in fields.values:
        size = fields.integer("sliding_window", 4096)
    windowed = [used and size is not None and layer >= first for layer in common.layers(num_layers)]
    return common.read_window(fields, size if used else None, num_layers, windowed)


def write_layers(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `read_layers` reads."""
    window = config.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": None if window is None else window.size,
        "max_window_layers": config.num_layers,
        "layer_types": common.layer_types(config),
    }


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields, max_positions=32768)
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"]),
        "attention_bias": True,
        "attention": _ATTENTION,
        "sliding_window": read_layers(fields, sizes["num_layers"]),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        **write_layers(config),
        "hidden_act": "silu",
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    keys.only("attention.sliding_window", 0)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"]),
        "attention_bias": True,
        "attention": _ATTENTION,
    }


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES),
    gguf=GgufLayout("qwen2", _read_gguf, common.table(common.GGUF_NAMES)),
)
