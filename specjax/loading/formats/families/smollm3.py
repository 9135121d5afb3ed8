"""SmolLM3: Llama in which every fourth layer has no rotation (Yang et al. 2501.18795)."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_PERIOD = 4
_ROTATED, _UNROTATED = "no_rope_layers", "attention.unrotated"


def _read_layers(fields: Fields, known: Values) -> Values:
    """Return which layers lack rotation, and the window of those that have one."""
    num_layers, period = known["num_layers"], fields.count("no_rope_layer_interval", _PERIOD)
    unrotated = [(layer + 1) % period == 0 for layer in schema.layers(num_layers)]
    if (stated := fields.integers(_ROTATED)) is not None:
        if len(stated) < num_layers or not {*stated} <= {0, 1}:
            raise fields.fail(_ROTATED, f"must have 1 or 0 for each of {num_layers} layers")
        unrotated = [not rotated for rotated in stated[:num_layers]]
    used, size = fields.flag("use_sliding_window"), fields.get("sliding_window")
    size = fields.integer("sliding_window") if used and size is not None else None
    windowed = [size is not None and layer for layer in unrotated]
    return {
        _UNROTATED: schema.shortest_period(unrotated),
        "sliding_window": schema.read_window(fields, size, num_layers, windowed),
    }


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    rotated = [int(not unrotated) for unrotated in config.unrotated]
    used = config.sliding_window is not None
    return {_ROTATED: rotated, "use_sliding_window": used, **schema.write_window(config)}


def _read_gguf_layers(_: Fields, known: Values) -> Values:
    unrotated = [(layer + 1) % _PERIOD == 0 for layer in schema.layers(known["num_layers"])]
    return {_UNROTATED: schema.shortest_period(unrotated)}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    parts=(
        *schema.sizes(max_positions=32768, tied=True),
        schema.rope(theta=2e6),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        Part(_read_layers, _write_layers, _read_gguf_layers),
        schema.SILU,
    ),
    tensors=table("huggingface"),
    gguf=GgufLayout("smollm3", table("gguf", paired=True)),
)
