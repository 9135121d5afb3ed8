"""OLMo 2 (2501.00656) and OLMo 3 (2512.13961).

Their norms are after attention and MLP instead of before, and those of queries and keys are over
all heads at once. OLMo 3 has windows in three of four layers, which do not scale rotary
frequencies.
"""

from __future__ import annotations

import numpy as np

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.layer_types import by_layer_type
from specjax.loading.formats.families.schema import Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.models.config import SlidingWindow

_SHARED = (
    *schema.sizes(epsilon=1e-5),
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
_NO_NORMS_BEFORE = {"attention_norm": "", "mlp_norm": ""}
_TENSORS = table(
    "huggingface",
    {
        **_NO_NORMS_BEFORE,
        "after_attention_norm": "post_attention_layernorm",
        "after_mlp_norm": "post_feedforward_layernorm",
    },
)

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
