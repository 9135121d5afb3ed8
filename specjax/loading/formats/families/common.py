"""Rows and parts of a config that several families have: sizes, rotary bases, windows, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.loading.formats.family import (
    HasTensor,
    Part,
    Values,
    flag,
    integer,
    number,
    row,
    written,
)
from specjax.loading.formats.gguf_fields import GgufFields, read_scaling
from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.typed_fields import Fields
from specjax.models.config import MOST_LAYERS, DecoderConfig, SlidingWindow

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers in config.json."""


def _heads(known: Values) -> int:
    return known["num_heads"]


def width_of_head(known: Values) -> int:
    """D/H, the width of a head that is not stated."""
    return known["hidden_size"] // max(known["num_heads"], 1)


def sizes(
    *,
    head_dim: int | None = None,
    max_positions: int = 2048,
    tied: bool = False,
    epsilon: float = 1e-6,
) -> tuple[Part, ...]:
    """Sizes and epsilon as most families have them; the arguments are defaults of config.json.

    Without `head_dim` it is D/H, as in GGUF files.
    """
    return (
        row("hidden_size", integer("hidden_size"), integer("embedding_length")),
        row("intermediate_size", integer("intermediate_size"), integer("feed_forward_length")),
        row("num_layers", integer("num_hidden_layers"), integer("block_count")),
        row("num_heads", integer("num_attention_heads"), integer("attention.head_count")),
        row(
            "num_kv_heads",
            integer("num_key_value_heads", _heads),
            integer("attention.head_count_kv", _heads),
        ),
        row(
            "head_dim",
            integer("head_dim", head_dim or width_of_head),
            integer("attention.key_length", width_of_head),
        ),
        row(
            "max_positions",
            integer("max_position_embeddings", max_positions),
            integer("context_length"),
        ),
        row(
            "rms_norm_eps",
            number("rms_norm_eps", epsilon),
            number("attention.layer_norm_rms_epsilon"),
        ),
        tied_head(tied),
    )


def tied_head(default: bool) -> Part:
    """Whether the embedding is the head: by config.json, and by a GGUF's tensors."""
    in_gguf = HasTensor("output.weight", absent=True)
    return row("tie_word_embeddings", flag("tie_word_embeddings", default), in_gguf)


ATTENTION_BIAS = row("attention_bias", flag("attention_bias"), HasTensor("blk.0.attn_q.bias"))
SILU = written({"hidden_act": "silu"})


def rope(
    *, theta: float = 10000.0, gguf_theta: float = 10000.0, partial: float | None = None
) -> Part:
    """The rotary base and scaling, one for all layers, and with `partial` the rotated part.

    The arguments are what files mean that do not state it.
    """

    def values(base: float, scaling: Any, rotary_width: int) -> Values:
        rotated = {} if partial is None else {"attention.rotary_width": rotary_width}
        return {"rope_theta": base, "rope_scaling": scaling, **rotated}

    def read(fields: Fields, known: Values) -> Values:
        found = read_rope(fields, known["max_positions"], theta=theta, partial=partial)
        return values(found.theta, found.scaling, int(known["head_dim"] * found.partial))

    def write(config: DecoderConfig) -> dict[str, Any]:
        part = config.rotary_width / config.head_dim
        return write_rope(config, **({} if partial is None else {"partial_rotary_factor": part}))

    def read_gguf(fields: GgufFields, known: Values) -> Values:
        width = known["head_dim"]
        if partial is None:
            fields.only("rope.dimension_count", width)
        else:
            width = fields.integer("rope.dimension_count", width)
        base = fields.number("rope.freq_base", gguf_theta)
        return values(base, read_scaling(fields, width), width)

    return Part(read, write, read_gguf)


def window_size(fields: Fields) -> int | None:
    """The size of sliding windows; null for none. Missing it is 4096, as in transformers."""
    if fields.get("sliding_window") is None and "sliding_window" in fields.values:
        return None
    return fields.integer("sliding_window", 4096)


def read_window(
    fields: Fields, size: int | None, num_layers: int, default: Sequence[bool]
) -> SlidingWindow | None:
    """The window of `size` of those layers that `layer_types` names, or else those of `default`.

    Raises InputError for other types, for another number of them, and for layers without a size.
    """
    types = fields.get("layer_types")
    if types is None:
        windowed = tuple(default)
    else:
        if not isinstance(types, list) or not set(map(str, types)) <= {FULL, SLIDING}:
            raise fields.fail(
                "layer_types", f"is not supported; the decoder supports {FULL} and {SLIDING}"
            )
        if len(types) != num_layers:
            raise fields.fail("layer_types", f"must have an entry for each of {num_layers} layers")
        windowed = tuple(kind == SLIDING for kind in types)
    if not any(windowed):
        return None
    if size is None:
        raise fields.fail("sliding_window", "is missing, and layer_types names sliding layers")
    return SlidingWindow(size, shortest_period(windowed))


def layers(num_layers: int) -> range:
    """The layers of a config that may be damaged: no more than `DecoderConfig` accepts."""
    return range(min(num_layers, MOST_LAYERS))


def write_window(config: DecoderConfig) -> dict[str, Any]:
    """The window's size, and the type of each layer as `read_window` reads it."""
    window = config.sliding_window
    return {
        "sliding_window": None if window is None else window.size,
        "layer_types": layer_types(config),
    }


def layer_types(config: DecoderConfig) -> list[str]:
    """The type of each layer, as `layer_types` in config.json."""
    return [SLIDING if windowed else FULL for windowed in config.windowed]


def shortest_period(flags: Sequence[bool]) -> tuple[bool, ...]:
    """The shortest beginning of a sequence that repeats to all of it.

    In linear time (Knuth, Morris and Pratt 1977): the number of layers may be a damaged file's.
    """
    longest = [0] * len(flags)  # the longest proper beginning that each part ends with
    for index in range(1, len(flags)):
        length = longest[index - 1]
        while length and flags[index] != flags[length]:
            length = longest[length - 1]
        longest[index] = length + (flags[index] == flags[length])
    return tuple(flags[: len(flags) - longest[-1]])
