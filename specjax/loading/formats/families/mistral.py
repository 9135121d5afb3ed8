"""Mistral (Jiang et al. 2310.06825): Llama, in early versions with a sliding window.

llama.cpp writes it as `llama`, without the window.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import DecoderConfig, SlidingWindow


def _read(fields: Fields) -> dict[str, Any]:
    sizes = common.read_sizes(fields, max_positions=131072)
    window = None
    # Of a config without the field, transformers has 4096.
    if fields.get("sliding_window") is not None or "sliding_window" not in fields.values:
        window = SlidingWindow(fields.integer("sliding_window", 4096))
    return {
        **sizes,
        **common.read_full_rope(fields, sizes["max_positions"]),
        "sliding_window": window,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    window = config.sliding_window
    return {
        **common.write_sizes(config),
        **common.write_one_rope(config),
        "hidden_act": "silu",
        "sliding_window": None if window is None else window.size,
    }


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES),
)
