"""OLMo 2 (2501.00656), OLMo 3 (2512.13961) and OLMo hybrid (Ai2 2026).

Their norms are after attention and MLP instead of before, and those of queries and keys are over
all heads at once. OLMo 3 has windows in three of four layers, which do not scale rotary
frequencies. In OLMo hybrid three of four layers are gated delta rules, whose norms are before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.layer_types import by_layer_type
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig, SlidingWindow

_LAYERS = (
    schema.ATTENTION_BIAS,
    schema.fixed(
        {
            "norm.before": False,
            "norm.after": True,
            "attention.qk_norm": True,
            "attention.qk_norm_over": "projection",
        }
    ),
    schema.SILU,
)
_SHARED = (*schema.sizes(epsilon=1e-5), *_LAYERS)
_NO_NORMS_BEFORE = {"attention_norm": "", "mlp_norm": ""}
_NORMS_AFTER = {
    "after_attention_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}
_TENSORS = table("huggingface", {**_NO_NORMS_BEFORE, **_NORMS_AFTER})

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    parts=(*_SHARED, schema.rope()),
    tensors=_TENSORS,
    gguf=GgufLayout("olmo2", table("gguf", _NO_NORMS_BEFORE)),
)

_PERIOD, _THETA, _WINDOWED = 4, 5e5, "attention.sliding_window_pattern"
_ROPE = schema.rope(gguf_theta=_THETA)


def _read_gguf_layers(fields: GgufFields, known: Values) -> Values:
    """Return the ropes, and the window of the layers that the file lists, or of three of four."""
    num_layers, stated = known["num_layers"], fields.get(_WINDOWED)
    windowed = [(layer + 1) % _PERIOD != 0 for layer in schema.layers(num_layers)]
    if isinstance(stated, bool):
        windowed = [stated]
    elif stated is not None:
        if not isinstance(stated, np.ndarray) or len(stated) != num_layers:
            raise fields.fail(_WINDOWED, f"must be a list with an entry for {num_layers} layers")
        windowed = [bool(flag) for flag in stated]
    rope, size = _ROPE.read_gguf(fields, known), fields.count("attention.sliding_window")
    window = SlidingWindow(size, schema.shortest_period(windowed), rope["rope_theta"])
    return {**rope, "sliding_window": window if any(windowed) else None}


# llama.cpp writes it as olmo2 with windows.
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    parts=(*_SHARED, by_layer_type(_PERIOD, _THETA, read_gguf=_read_gguf_layers)),
    tensors=_TENSORS,
    gguf=GgufLayout("olmo2", table("gguf", _NO_NORMS_BEFORE), windows=True),
)


def _read_rope(fields: Fields, known: Values) -> Values:
    """Return the ropes; nothing is rotated where the file states null as the base."""
    stated = fields.get("rope_parameters")
    for section in (stated if isinstance(stated, dict) else {}, fields.values):
        if "rope_theta" in section:
            if section["rope_theta"] is None:
                fields.asked |= {"rope_theta", "rope_scaling"}
                return {"attention.rotary_width": 0}
            break
    return _HYBRID_ROPE.read(fields, known)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    if config.rotary_width:
        return _HYBRID_ROPE.write(config)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _default_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Return which layers are recurrent by default: three of four, and never all."""
    flags = recurrent.every(_PERIOD)(fields, num_layers)
    return [*flags[:-1], False] if all(flags) else flags


def _heads(known: Values) -> int:
    return known["num_heads"]


_HYBRID_ROPE = schema.rope()

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    parts=(
        *schema.sizes(max_positions=65536),
        *_LAYERS,
        schema.fixed({"norm.before_recurrent": True, "recurrence.norm_epsilon": 1e-5}),
        Part(_read_rope, _write_rope),
        recurrent.layer_types(recurrent.LINEAR, _default_layers),
        *recurrent.delta_rule(
            _heads,
            _heads,
            lambda known: int(0.75 * known["hidden_size"] / max(known["recurrence.key_heads"], 1)),
            lambda known: 2 * known["recurrence.key_width"],
        ),
        schema.flag("recurrence.doubled", "linear_allow_neg_eigval", default=True),
        # How training begins.
        schema.unread("linear_a_log_min", "linear_a_log_max", "linear_dt_init_floor"),
        schema.unread("linear_dt_min", "linear_dt_max"),
    ),
    tensors=table(
        "huggingface",
        {
            **_NORMS_AFTER,
            "attention_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "recurrence.taps.query": "linear_attn.q_conv1d.weight",
            "recurrence.taps.key": "linear_attn.k_conv1d.weight",
            "recurrence.taps.value": "linear_attn.v_conv1d.weight",
            "recurrence.query": "linear_attn.q_proj",
            "recurrence.key": "linear_attn.k_proj",
            "recurrence.value": "linear_attn.v_proj",
            "recurrence.gate": "linear_attn.g_proj",
            "recurrence.share": "linear_attn.b_proj",
            "recurrence.decay": "linear_attn.a_proj",
            "recurrence.norm": "linear_attn.o_norm",
            "recurrence.output": "linear_attn.o_proj",
        },
    ),
)
