"""Phi-3, 3.5 and 4 (2404.14219, 2412.08905) and Phi-4-mini (2503.01743).

They are Llama with fused projections. Some have LongRoPE, a window in all layers or, Phi-4-mini, a
share of each head that is rotated.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig, SlidingWindow

_QKV, _GATE_UP = ("attention.query", "attention.key", "attention.value"), ("mlp.gate", "mlp.up")
_FUSED = (_QKV, _GATE_UP)


def _read_rest(fields: Fields, known: Values) -> Values:
    """Return the window, and check the fields of Phi-4-mini that its code does not read."""
    for name in ("full_attn_mod", "interpolate_factor"):
        fields.only(name, 1)
    size = fields.get("sliding_window")
    return _window(None if size is None else fields.integer("sliding_window"), known)


def _read_gguf_rest(fields: GgufFields, known: Values) -> Values:
    return _window(fields.integer("attention.sliding_window", 0) or None, known)


def _window(size: int | None, known: Values) -> Values:
    """Return the window; one as long as the longest context has no effect."""
    used = size is not None and size < known["max_positions"]
    return {"sliding_window": SlidingWindow(size) if used else None}


def _write_rest(config: DecoderConfig) -> dict[str, Any]:
    window, scaling = config.sliding_window, config.rope_scaling
    original = config.max_positions
    if scaling is not None and scaling.short_factors:
        original = scaling.original_max_positions
    return {
        "sliding_window": None if window is None else window.size,
        "original_max_position_embeddings": original,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    parts=(
        *schema.sizes(max_positions=4096, epsilon=1e-5),
        schema.rope(partial=1.0),
        Part(_read_rest, _write_rest, _read_gguf_rest),
        schema.SILU,
    ),
    tensors=table(
        "huggingface",
        dict.fromkeys(_QKV, "self_attn.qkv_proj") | dict.fromkeys(_GATE_UP, "mlp.gate_up_proj"),
        fused=_FUSED,
    ),
    gguf=GgufLayout(
        "phi3",
        table("gguf", dict.fromkeys(_QKV, "attn_qkv") | {"mlp.gate": "ffn_up"}, fused=_FUSED),
    ),
)
