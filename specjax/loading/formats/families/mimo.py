"""MiMo-7B (2505.07608): Qwen2 with modules for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from specjax.loading.formats.families import qwen2
from specjax.loading.formats.family import MtpLayout

FAMILY = replace(
    qwen2.FAMILY,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    gguf=None,
    mtp=MtpLayout(
        prefix="model.mtp_layers.{module}",
        names={
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "projection": "input_proj",
            "final_norm": "final_layernorm",
        },
        concat="hidden_first",
    ),
)
