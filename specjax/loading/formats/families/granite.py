"""Granite 3 (IBM 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout


def usual_scale(known: Values) -> float:
    """Return 1/sqrt(C), given the values that earlier parts have read."""
    return known["head_dim"] ** -0.5


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    parts=(
        *schema.sizes(),
        schema.rope(),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        schema.number("embedding.scale", "embedding_multiplier", "embedding_scale", 1.0, 1.0),
        schema.number(
            "attention.query_scale", "attention_multiplier", "attention.scale", 1.0, usual_scale
        ),
        schema.number("residual_scale", "residual_multiplier", "residual_scale", 1.0, 1.0),
        schema.number("logit_divisor", "logits_scaling", "logit_scale", 1.0, 1.0),
        schema.SILU,
    ),
    tensors=table("huggingface"),
    # Without it, llama.cpp does not rotate.
    gguf=GgufLayout("granite", table("gguf", paired=True), fixed={"rope.scaling.finetuned": True}),
)
