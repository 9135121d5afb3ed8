"""Fields that families with recurrent layers share: which layers these are, and Mamba-2's sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import FULL, Part, Values
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.tokenizers.huggingface_tokenizer import INFINITY
from specjax.loading.typed_fields import Fields
from specjax.models.config import UNLIMITED, DecoderConfig

Default = int | Callable[[Values], int]
"""A size that a file need not state, or how it results from earlier values."""
LINEAR = "linear_attention"
"""The name that transformers 5 uses for recurrent layers with a matrix."""


def fused_taps(*parts: str) -> tuple[tuple[str, ...], ...]:
    """Return the modules of a convolution whose weights, and biases, are one tensor, in order."""
    return tuple(
        tuple(f"recurrence.{name}.{part}" for part in parts) for name in ("taps", "taps_bias")
    )


DELTA_FUSED = fused_taps("query", "key", "value")
"""The modules of the delta rule that are one tensor of the convolution."""
_PROJECTED = ("gate", "value", "key", "query", "decay")
_CONVOLVED = ("value", "key", "query")
MAMBA_FUSED = (tuple(f"recurrence.{part}" for part in _PROJECTED), *fused_taps(*_CONVOLVED))
"""The modules of Mamba-2 that are one tensor, in order."""
MAMBA_GGUF = {f"recurrence.{part}": "ssm_in" for part in _PROJECTED}
"""The name of Mamba-2's projection in GGUF files."""
MAMBA_NAMES = {
    **{f"recurrence.taps.{part}": "mamba.conv1d.weight" for part in _CONVOLVED},
    **{f"recurrence.taps_bias.{part}": "mamba.conv1d.bias" for part in _CONVOLVED},
    **{f"recurrence.{part}": "mamba.in_proj" for part in _PROJECTED},
    "recurrence.log_rate": "mamba.A_log",
    "recurrence.rate_bias": "mamba.dt_bias",
    "recurrence.skip": "mamba.D",
    "recurrence.norm": "mamba.norm",
    "recurrence.output": "mamba.out_proj",
}
"""The names of Mamba-2's modules."""


def layer_types(
    recurrent: str,
    default: Callable[[Fields, int], list[bool]],
    others: Mapping[str, str] | None = None,
    read_gguf: Callable[[GgufFields, Values], Values] = schema.nothing,
) -> Part:
    """Return a part for the mixer of each layer, which `layer_types` of config.json names.

    `recurrent` is the name of recurrent layers, and `others` are further names by the mixer that
    they stand for. Without the field, `default` says of each layer whether it is recurrent.
    `read_gguf` reads them from a GGUF file.
    """
    mixers = {FULL: "attention", recurrent: "recurrent", **(others or {})}

    def read(fields: Fields, known: Values) -> Values:
        count, types = known["num_layers"], fields.get("layer_types")
        if types is None:
            flags = default(fields, count)
            return {"mixers": _pattern("recurrent" if flag else "attention" for flag in flags)}
        if not isinstance(types, list) or not set(map(str, types)) <= mixers.keys():
            supported = " and ".join(mixers)
            raise fields.fail("layer_types", f"is not supported; the decoder supports {supported}")
        if len(types) != count:
            raise fields.fail("layer_types", f"must have an entry for each of {count} layers")
        return {"mixers": _pattern(mixers[kind] for kind in types)}

    def write(config: DecoderConfig) -> dict[str, Any]:
        attention = config.layers_with("attention")
        layers = range(config.num_layers)
        return {"layer_types": [FULL if layer in attention else recurrent for layer in layers]}

    return Part(read, write, read_gguf)


_KV_HEADS = "attention.head_count_kv"


def kv_heads(fields: GgufFields) -> int:
    """Return the number of key/value heads of layers with attention; others are said to have 0."""
    return fields.largest(_KV_HEADS)


def by_kv_heads(fields: GgufFields, known: Values) -> Values:
    """Return the mixers of a GGUF file: layers without key/value heads are recurrent."""
    heads = fields.by_layer(_KV_HEADS, len(schema.layers(known["num_layers"])))
    return {"mixers": _pattern("attention" if count else "recurrent" for count in heads)}


def by_interval(period: int) -> Callable[[GgufFields, Values], Values]:
    """Return a reader of the mixers of a GGUF file, which states the period, or it is `period`."""

    def read(fields: GgufFields, known: Values) -> Values:
        flags = every(period)(fields, known["num_layers"])
        return {"mixers": _pattern("recurrent" if flag else "attention" for flag in flags)}

    return read


def value_width_of_gguf(fields: GgufFields) -> int:
    """Return the width of a value head, given the width and the heads that a GGUF file states."""
    heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if inner % heads:
        raise fields.fail("ssm.inner_size", f"must be a multiple of ssm.time_step_rank={heads}")
    return inner // heads


def has_conv_bias(fields: GgufFields) -> bool:
    """Return whether the convolutions of Mamba-2 have biases."""
    return any(name.endswith(".ssm_conv1d.bias") for name in fields.file.tensors)


def _pattern(mixers: Any) -> tuple[str, ...]:
    return schema.shortest_period(tuple(mixers))


def every(period: int) -> Callable[[Fields, int], list[bool]]:
    """Return the default of `layer_types`: all layers but each `period`-th are recurrent.

    The field `full_attention_interval` may state another period.
    """

    def flags(fields: Fields, num_layers: int) -> list[bool]:
        stated = fields.count("full_attention_interval", period)
        return [(layer + 1) % stated != 0 for layer in schema.layers(num_layers)]

    return flags


def delta_rule(
    key_heads: Default = 16,
    value_heads: Default = 32,
    key_width: Default = 128,
    value_width: Default = 128,
) -> tuple[Part, ...]:
    """Return the parts for the sizes of the gated delta rule, by the names of Qwen3-Next.

    The arguments are the sizes that a config.json need not state.
    """
    return (
        schema.fixed({"recurrence.kind": "delta"}),
        schema.integer("recurrence.conv_width", "linear_conv_kernel_dim", "ssm.conv_kernel", 4),
        schema.integer(
            "recurrence.key_heads", "linear_num_key_heads", "ssm.group_count", key_heads
        ),
        schema.integer(
            "recurrence.value_heads", "linear_num_value_heads", "ssm.time_step_rank", value_heads
        ),
        schema.integer("recurrence.key_width", "linear_key_head_dim", "ssm.state_size", key_width),
        schema.integer(
            "recurrence.value_width", "linear_value_head_dim", value_width_of_gguf, value_width
        ),
    )


def mamba2() -> tuple[Part, ...]:
    """Return the parts for the sizes of Mamba-2, by the names of Bamba and Granite 4."""
    return (
        schema.fixed({"recurrence.kind": "mamba2"}),
        schema.integer("recurrence.conv_width", "mamba_d_conv", "ssm.conv_kernel", 4),
        schema.integer("recurrence.key_heads", "mamba_n_groups", "ssm.group_count", 1),
        schema.integer("recurrence.value_heads", "mamba_n_heads", "ssm.time_step_rank", 128),
        schema.integer("recurrence.key_width", "mamba_d_state", "ssm.state_size", 256),
        schema.flag("recurrence.conv_bias", "mamba_conv_bias", has_conv_bias, True),
        schema.flag("recurrence.bias", "mamba_proj_bias", default=False),
        Part(_read_width, _write_width, _read_gguf_width),
        step_limits("time_step_limit"),
        schema.unread("mamba_chunk_size"),
    )


def _read_width(fields: Fields, known: Values) -> Values:
    """Return the width of a head, which is stated, or results from that of the inner layer."""
    fields.asked |= {"mamba_expand", "mamba_d_head"}
    if "recurrent" not in known["mixers"]:
        return {}
    inner, heads = fields.integer("mamba_expand", 2) * known["hidden_size"], "mamba_n_heads"
    stated, count = fields.get("mamba_d_head"), known["recurrence.value_heads"]
    width = inner // max(count, 1) if stated in (None, "auto") else fields.integer("mamba_d_head")
    if width * count != inner:
        raise fields.fail(
            heads, f"times mamba_d_head={width} must be mamba_expand * hidden_size={inner}"
        )
    return {"recurrence.value_width": width}


def _read_gguf_width(fields: GgufFields, known: Values) -> Values:
    return {"recurrence.value_width": value_width_of_gguf(fields)}


def _write_width(config: DecoderConfig) -> dict[str, Any]:
    if (recurrence := config.recurrence) is None:
        return {}
    inner = recurrence.value_heads * recurrence.value_width
    return {"mamba_d_head": recurrence.value_width, "mamba_expand": inner // config.hidden_size}


def step_limits(name: str) -> Part:
    """Return a part for the least and the largest step of Mamba-2: two numbers, or null."""

    def read(fields: Fields, known: Values) -> Values:
        stated = fields.get(name)
        if stated is None:
            return {}
        limits = stated if isinstance(stated, list) else []
        limits = [UNLIMITED if one == INFINITY else one for one in limits]
        if len(limits) != 2 or not all(type(one) in (int, float) for one in limits):
            raise fields.fail(name, "must be two numbers")
        return {"recurrence.step_limits": tuple(map(float, limits))}

    def write(config: DecoderConfig) -> dict[str, Any]:
        recurrence = config.recurrence
        if recurrence is None or recurrence.step_limits == (0.0, UNLIMITED):
            return {}
        low, high = recurrence.step_limits
        return {name: [low, INFINITY if high == UNLIMITED else high]}

    return Part(read, write)
