"""Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786).

Both have norms of 1 + scale before and after, soft caps and alternating windows. Gemma 3 adds
QK-norms, and a separate rotary base for the five of six layers with a window.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.layer_types import by_layer_type
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig, SlidingWindow

_GLOBAL, _LOCAL = 1_000_000.0, 10_000.0
"""Gemma 3's rotary bases of layers without and with a window, unless a config states them."""
_PERIOD = 6
_SCALAR = "query_pre_attn_scalar"
_SCALE = "attention.query_scale"


def _read_query_scale(fields: Fields, known: Values) -> Values:
    scalar = fields.number(_SCALAR, 256)
    if scalar <= 0:
        raise fields.fail(_SCALAR, "must be a positive number; repair config.json")
    return {_SCALE: scalar**-0.5}


def _write_query_scale(config: DecoderConfig) -> dict[str, Any]:
    scale = config.attention.query_scale
    scalar = config.head_dim if scale is None else scale**-2
    return {_SCALAR: round(scalar) if round(scalar) ** -0.5 == scale else scalar}


def _query_scale(layers_of_27b: int) -> Part:
    """Return a part for the query scale, 1/sqrt(`query_pre_attn_scalar`) in config.json.

    GGUF files lack it, and llama.cpp infers it from the model's size: `layers_of_27b` is the number
    of layers of the 27B model.
    """

    def read_gguf(fields: GgufFields, known: Values) -> Values:
        if known["num_layers"] == layers_of_27b:
            return {_SCALE: (known["hidden_size"] // max(known["num_heads"], 1)) ** -0.5}
        return {_SCALE: known["head_dim"] ** -0.5}

    return Part(_read_query_scale, _write_query_scale, read_gguf)


def _ignore_activation(fields: Fields, known: Values) -> Values:
    fields.get("hidden_act")  # a leftover that transformers does not read
    return {}


def _shared(max_positions: int, layers_of_27b: int) -> tuple[Part, ...]:
    """Return the parts that Gemma 2 and 3 share: all except rotary bases and windows."""
    return (
        *schema.sizes(head_dim=256, max_positions=max_positions, tied=True),
        schema.fixed({"norm.offset": 1, "norm.after": True, "mlp.activation": "gelu_tanh"}),
        schema.computed("embedding.scale", lambda known: known["hidden_size"] ** 0.5),
        schema.flag("attention_bias", "attention_bias"),
        _query_scale(layers_of_27b),
        Part(_ignore_activation),
        schema.written({"hidden_activation": "gelu_pytorch_tanh"}),
    )


_NAMES = {
    "mlp_norm": "pre_feedforward_layernorm",
    "after_attention_norm": "post_attention_layernorm",
    "after_mlp_norm": "post_feedforward_layernorm",
}


def _softcap(path: str, name: str, default: float | None) -> Part:
    return schema.optional_number(path, name, name, default, default)


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    parts=(
        *_shared(8192, layers_of_27b=46),
        schema.rope(),
        _softcap("attention.softcap", "attn_logit_softcapping", 50.0),
        _softcap("logit_softcap", "final_logit_softcapping", 30.0),
        schema.alternating_window(4096),
    ),
    tensors=table("huggingface", _NAMES),
    gguf=GgufLayout("gemma2", table("gguf", norms_added=1)),
)


def _read_gguf_layers3(fields: GgufFields, known: Values) -> Values:
    # llama.cpp reads a file without the key as one without windows.
    size = fields.integer("attention.sliding_window", 0)
    period = fields.integer("attention.sliding_window_pattern", _PERIOD)
    if size and not period:
        fields.only("attention.sliding_window_pattern", _PERIOD)
    windowed = [(layer + 1) % max(period, 1) != 0 for layer in schema.layers(known["num_layers"])]
    window = None
    if size and any(windowed):
        local = fields.number("rope.freq_base_swa", _LOCAL)
        window = SlidingWindow(size, schema.shortest_period(windowed), local)
    return {**schema.rope(gguf_theta=_GLOBAL).read_gguf(fields, known), "sliding_window": window}


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    parts=(
        *_shared(131072, layers_of_27b=62),
        schema.fixed({"attention.qk_norm": True}),
        _softcap("logit_softcap", "final_logit_softcapping", None),
        by_layer_type(
            _PERIOD,
            _GLOBAL,
            local_theta=_LOCAL,
            local_field="rope_local_base_freq",
            period_fields=("_sliding_window_pattern", "sliding_window_pattern"),
            read_gguf=_read_gguf_layers3,
        ),
    ),
    tensors=table("huggingface", _NAMES),
    gguf=GgufLayout("gemma3", table("gguf", norms_added=1)),
)
