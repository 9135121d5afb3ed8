"""Granite 3 (IBM 2024): Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields


def usual_scale(known: Values) -> float:
    """Return 1/sqrt(C), given the values that earlier parts have read."""
    return known["head_dim"] ** -0.5


def mlp_width(fields: GgufFields) -> int:
    """Return the width of the MLP in a GGUF file, which states that of a shared one apart."""
    shared = fields.integer("expert_shared_feed_forward_length", 0)
    return shared or fields.integer("feed_forward_length")


_OF_MAMBA = frozenset(
    f"ssm.{name}"
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def _read_gguf_rest(fields: GgufFields, known: Values) -> Values:
    """Return the width of the MLP, and ignore the sizes that Granite 4 with attention alone has."""
    fields.asked |= _OF_MAMBA
    return {"intermediate_size": mlp_width(fields)}


MULTIPLIERS = (
    schema.number("embedding.scale", "embedding_multiplier", "embedding_scale", 1.0, 1.0),
    schema.number(
        "attention.query_scale", "attention_multiplier", "attention.scale", 1.0, usual_scale
    ),
    schema.number("residual_scale", "residual_multiplier", "residual_scale", 1.0, 1.0),
    schema.number("logit_divisor", "logits_scaling", "logit_scale", 1.0, 1.0),
)
"""The multipliers of embeddings, scores, residuals and logits."""

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    parts=(
        *schema.sizes(),
        Part(read_gguf=_read_gguf_rest),
        schema.rope(),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        *MULTIPLIERS,
        schema.SILU,
    ),
    tensors=table("huggingface"),
    # Without it, llama.cpp does not rotate.
    gguf=GgufLayout("granite", table("gguf", paired=True), fixed={"rope.scaling.finetuned": True}),
)
