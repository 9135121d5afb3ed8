"""OLMo 2 (2501.00656) and OLMo 3 (2512.13961).

Their norms are after attention and MLP instead of before, and those of queries and keys are over
all heads at once. OLMo 3 has windows in three of four layers, which do not scale rotary
frequencies.
"""

from __future__ import annotations

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.layer_types import by_layer_type
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout

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

# llama.cpp writes it as olmo2 with windows.
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    parts=(*_SHARED, by_layer_type(period=4, theta=5e5)),
    tensors=_TENSORS,
)
