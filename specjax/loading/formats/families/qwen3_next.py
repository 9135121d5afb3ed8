"""Qwen3-Next and Qwen3.5: gated delta rules, and every fourth layer gated attention.

Attention has a gate per head, rotates a quarter of each head, and norms multiply by 1 + scale.
Qwen3-Next and some of Qwen3.5 have experts, and a shared one with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.glm import GGUF_MTP
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout, MtpLayout
from specjax.loading.formats.gguf_fields import MTP_MODULES, GgufFields
from specjax.loading.formats.parameter_names import TensorEntry

_FUSED = (
    ("recurrence.query", "recurrence.key", "recurrence.value"),
    *recurrent.DELTA_FUSED,
)
_SIZES = schema.sizes(head_dim=256, max_positions=32768)
_LAYERS = (
    schema.rope(partial=0.25),
    schema.fixed({"norm.offset": 1, "attention.qk_norm": True, "attention.gated": True}),
    schema.ATTENTION_BIAS,
    recurrent.layer_types(recurrent.LINEAR, recurrent.every(4), read_gguf=recurrent.by_interval(4)),
    schema.unread("full_attention_interval"),
    *recurrent.delta_rule(),
    schema.SILU,
    schema.constant("attn_output_gate", True),
    schema.constant("mamba_ssm_dtype", "float32"),
)
_WIDTH, _SHARED = "expert_feed_forward_length", "expert_shared_feed_forward_length"


def _experts(count: int, per_token: int) -> tuple[Part, ...]:
    """Return the parts for experts, by default `count` of them, of which a token uses some."""
    return (
        schema.integer("experts.num_experts", "num_experts", "expert_count", count),
        schema.integer("experts.per_token", "num_experts_per_tok", "expert_used_count", per_token),
        schema.integer("experts.intermediate_size", "moe_intermediate_size", _WIDTH, 512),
        schema.integer("experts.shared_size", "shared_expert_intermediate_size", _SHARED, 512),
        schema.fixed({"experts.shared_gate": True}),
        schema.written({"decoder_sparse_step": 1, "mlp_only_layers": []}),
    )


_OF_SHARED = {
    f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
_OF_KEY_HEADS = {
    f"recurrence.{part}": "" for part in ("query", "key", "value", "gate", "share", "decay")
} | {"recurrence.qkvz": "linear_attn.in_proj_qkvz", "recurrence.rates": "linear_attn.in_proj_ba"}
"""The projections of Qwen3-Next, which have the outputs of each key head side by side."""
_MTP = MtpLayout(
    prefix="mtp",
    layer=".layers.0",
    names={
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "final_norm": "norm",
    },
    zero_first_embedding=False,
)

_NO_RATES = {"recurrence.share": "", "recurrence.decay": ""}


def _gguf(names: Mapping[str, str] = MappingProxyType({})) -> tuple[TensorEntry, ...]:
    """Return the tensors of a GGUF file, with these names instead of the usual ones."""
    usual = {"mlp_norm": "post_attention_norm"}
    return table("gguf", {**usual, **names}, norms_added=1, fused=_FUSED)


def _apart(entries: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return the entries with value heads in the order of Qwen3.5's GGUF files."""
    return tuple(
        entry._replace(heads_apart="recurrence" in entry.path and bool(_OF_VALUES & {*entry.path}))
        for entry in entries
    )


_OF_VALUES = frozenset(("value", "gate", "share", "decay", "log_rate", "rate_bias", "output"))


def _read_order(fields: GgufFields, known: Values) -> Values:
    """Ignore the parts of a head that are rotated by the positions of images."""
    fields.asked.add("rope.dimension_sections")
    return {}


_ORDER = Part(read_gguf=_read_order)
_GGUF_MTP = replace(GGUF_MTP, copies={}, zero_first_embedding=False, norms_added=1)


def _read_layers(fields: GgufFields, known: Values) -> Values:
    """Return the number of layers, among which the file counts modules."""
    return {"num_layers": known["num_layers"] - fields.integer(MTP_MODULES, 0)}


_LESS_MODULES = Part(read_gguf=_read_layers)


def _mlp_width(fields: GgufFields) -> int:
    return fields.integer("feed_forward_length", fields.integer(_WIDTH))


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    parts=(
        *_SIZES,
        *_LAYERS,
        *_experts(512, 10),
        schema.flag("experts.normalize", "norm_topk_prob", default=True),
    ),
    tensors=table("huggingface", _OF_SHARED | _OF_KEY_HEADS, fused=recurrent.DELTA_FUSED),
    gguf=GgufLayout("qwen3next", _gguf({"recurrence.rates": "ssm_ba"} | _NO_RATES), experts=True),
    mtp=replace(_MTP, unannounced=True),
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    parts=(*_SIZES, _LESS_MODULES, *_LAYERS, _ORDER),
    tensors=table("huggingface", fused=_FUSED),
    gguf=GgufLayout("qwen35", _apart(_gguf()), mtp=_GGUF_MTP),
    mtp=_MTP,
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    parts=(
        *_SIZES[:1],
        schema.integer(
            "intermediate_size", ("intermediate_size", "moe_intermediate_size"), _mlp_width, 512
        ),
        *_SIZES[2:],
        _LESS_MODULES,
        *_LAYERS,
        *_experts(256, 8),
        _ORDER,
    ),
    tensors=table("huggingface", _OF_SHARED, fused=_FUSED),
    gguf=GgufLayout("qwen35moe", _apart(_gguf()), experts=True, mtp=_GGUF_MTP),
    mtp=_MTP,
)
