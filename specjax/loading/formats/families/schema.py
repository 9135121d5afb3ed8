"""The schema of configs: the name of each field in config.json and in GGUF files.

A field serves both formats, and reading as well as writing. What a field cannot express is a `Part`
with special functions. Fields shared by several families follow below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from specjax.loading.formats.gguf_fields import GgufFields, read_scaling
from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.typed_fields import Fields
from specjax.models.config import MOST_LAYERS, DecoderConfig, SlidingWindow

Values = Mapping[str, Any]
"""Fields of a `DecoderConfig` by name; those of nested configs are dotted: "attention.softcap"."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The names that config.json uses for types of layers."""


def nothing(*_: Any) -> dict[str, Any]:
    """Return no fields: the reader or writer of a part that has none."""
    return {}


@dataclass(frozen=True)
class Part:
    """One or several fields of a config that are read and written together.

    `read` (config.json) and `read_gguf` return their values, given the fields of the file and the
    values read by earlier parts; `write` returns the fields of config.json, given the config: a
    `DecoderConfig`, or that of a head (`methods.heads.published_layout`).
    """

    read: Callable[[Fields, Values], Values] = nothing
    write: Callable[[Any], Mapping[str, Any]] = nothing
    read_gguf: Callable[[GgufFields, Values], Values] = nothing


def _row(
    kind: Callable[[Fields, str, Any], Any],
    path: str,
    json: str | tuple[str, ...],
    gguf: str | Callable[[GgufFields], Any] | None = None,
    default: Any = None,
    gguf_default: Any = None,
) -> Part:
    """Return the part for the field `path` of a config.

    `kind` reads a value of its type. `json` is its name in config.json; of several names the first
    that a file states counts. `gguf` is its key in a GGUF file, or a function of the file's fields;
    a field without it is not read from GGUF. `default` and `gguf_default` apply to files without
    the field, and may be functions of the values read so far; without a default the field is
    required.
    """
    names = (json,) if isinstance(json, str) else json

    def evaluated(default: Any, known: Values) -> Any:
        return default(known) if callable(default) else default

    def read(fields: Fields, known: Values) -> Values:
        stated = [name for name in names if fields.values.get(name) is not None]
        name = (stated or names[-1:])[0]
        return {path: kind(fields, name, evaluated(default, known))}

    def read_gguf(fields: GgufFields, known: Values) -> Values:
        if gguf is None:
            return {}
        if callable(gguf):
            return {path: gguf(fields)}
        return {path: kind(fields, gguf, evaluated(gguf_default, known))}

    def write(config: Any) -> dict[str, Any]:
        section = path.partition(".")[0]
        if section in ("experts", "recurrence") and getattr(config, section) is None:
            return {}
        return {names[0]: attrgetter(path)(config)}

    return Part(read, write, read_gguf)


integer = functools.partial(_row, Fields.integer)
count = functools.partial(_row, Fields.count)
number = functools.partial(_row, Fields.number)
optional_number = functools.partial(_row, Fields.optional_number)
flag = functools.partial(_row, Fields.flag)


def has_tensor(name: str) -> Callable[[GgufFields], bool]:
    """Return a reader of a flag that is True if a GGUF file has the tensor `name`."""
    return lambda fields: name in fields.file.tensors


def computed(path: str, function: Callable[[Values], Any]) -> Part:
    """Return a part for a field that `function` computes from the values of earlier parts."""

    def read(_: Fields, known: Values) -> Values:
        return {path: function(known)}

    return Part(read, nothing, read)


def fixed(values: Values) -> Part:
    """Return a part for fields that have these values in every model of a family."""
    return Part(lambda *_: values, nothing, lambda *_: values)


def written(fields: Mapping[str, Any]) -> Part:
    """Return a part for constants that are written to config.json and ignored when it is read."""
    return Part(write=lambda _: fields)


def unread(*names: str) -> Part:
    """Return a part for fields of config.json that have no effect on the models that are read."""

    def read(fields: Fields, known: Values) -> Values:
        fields.asked.update(names)
        return {}

    return Part(read)


def constant(name: str, value: Any) -> Part:
    """Return a part for a field of config.json that must have `value`, or be missing.

    No field of the decoder's config is read from it; `value` is written.
    """

    def read(fields: Fields, known: Values) -> Values:
        fields.only(name, value)
        return {}

    return Part(read, lambda _: {name: value})


def heads(known: Values) -> int:
    """Return the number of query heads (H), given the values that earlier parts have read."""
    return known["num_heads"]


def width_of_head(known: Values) -> int:
    """Return D/H, the default width of a head, given the values that earlier parts have read."""
    return known["hidden_size"] // max(known["num_heads"], 1)


def sizes(
    *,
    head_dim: int | None = None,
    max_positions: int = 2048,
    tied: bool = False,
    epsilon: float = 1e-6,
) -> tuple[Part, ...]:
    """Return the parts for sizes and epsilon that most families share.

    The arguments are the defaults of config.json: the width of a head, the longest context in
    tokens, whether embedding and head are tied, and the epsilon of norms. Without `head_dim` the
    default is D/H, as in GGUF files.
    """
    width = head_dim or width_of_head
    return (
        integer("hidden_size", "hidden_size", "embedding_length"),
        integer("intermediate_size", "intermediate_size", "feed_forward_length"),
        integer("num_layers", "num_hidden_layers", "block_count"),
        integer("num_heads", "num_attention_heads", "attention.head_count"),
        integer("num_kv_heads", "num_key_value_heads", "attention.head_count_kv", heads, heads),
        integer("head_dim", "head_dim", "attention.key_length", width, width_of_head),
        integer("max_positions", "max_position_embeddings", "context_length", max_positions),
        number("rms_norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon", epsilon),
        tied_head(tied),
    )


def tied_head(default: bool) -> Part:
    """Return a part for whether embedding and output head are one matrix.

    config.json states it, or else `default` holds; a GGUF file shows it by its tensors.
    """

    def in_gguf(fields: GgufFields) -> bool:
        return "output.weight" not in fields.file.tensors

    return flag("tie_word_embeddings", "tie_word_embeddings", in_gguf, default)


def experts(count: str, intermediate_size: int) -> tuple[Part, ...]:
    """Return the parts for the number and width of experts.

    `count` is the family's name of the number, accepted beside that of transformers 5.
    """
    width = ("moe_intermediate_size", "expert_feed_forward_length", intermediate_size)
    return (
        integer("experts.num_experts", (count, "num_local_experts"), "expert_count", 128),
        integer("experts.per_token", "num_experts_per_tok", "expert_used_count", 8),
        integer("experts.intermediate_size", *width),
    )


ATTENTION_BIAS = flag("attention_bias", "attention_bias", has_tensor("blk.0.attn_q.bias"))
MLP_BIAS = flag("mlp_bias", "mlp_bias", has_tensor("blk.0.ffn_gate.bias"))
SILU = written({"hidden_act": "silu"})


def rope(
    *, theta: float = 10000.0, gguf_theta: float = 10000.0, partial: float | None = None
) -> Part:
    """Return a part for rotary base and scaling and, with `partial`, the rotated share of a head.

    `theta` is the base of a config.json that does not state it, `gguf_theta` that of a GGUF file,
    and `partial` the share.
    """

    def values(base: float, scaling: Any, rotary_width: int) -> Values:
        rotated = {} if partial is None else {"attention.rotary_width": rotary_width}
        return {"rope_theta": base, "rope_scaling": scaling, **rotated}

    def read(fields: Fields, known: Values) -> Values:
        rotary = read_rope(fields, known["max_positions"], theta=theta, partial=partial)
        return values(rotary.theta, rotary.scaling, int(known["head_dim"] * rotary.partial))

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
    """Return the size of sliding windows, or None if the file says null.

    By default it is 4096, as in transformers.
    """
    if fields.get("sliding_window") is None and "sliding_window" in fields.values:
        return None
    return fields.integer("sliding_window", 4096)


def read_window(
    fields: Fields, size: int | None, num_layers: int, default: Sequence[bool]
) -> SlidingWindow | None:
    """Return the window of `size` on the layers that `layer_types` marks, or on those of `default`.

    Raises InputError for unknown types, a wrong number of them, and windowed layers without a size.
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


def alternating_window(size: int) -> Part:
    """Return a part for a window of, by default, `size` tokens in every other layer from the first.

    config.json may state other layers (`layer_types`).
    """

    def read(fields: Fields, known: Values) -> Values:
        num_layers, stated = known["num_layers"], fields.integer("sliding_window", size)
        alternating = [layer % 2 == 0 for layer in layers(num_layers)]
        return {"sliding_window": read_window(fields, stated, num_layers, alternating)}

    def read_gguf(fields: GgufFields, known: Values) -> Values:
        stated = fields.integer("attention.sliding_window", size)
        return {"sliding_window": SlidingWindow(stated, (True, False)) if stated else None}

    return Part(read, write_window, read_gguf)


def layers(num_layers: int) -> range:
    """Return the indices of `num_layers` layers, of at most as many as `DecoderConfig` allows.

    The number may come from a damaged file.
    """
    return range(min(num_layers, MOST_LAYERS))


def write_window(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json for the window's size and the type of each layer."""
    window = config.sliding_window
    return {
        "sliding_window": None if window is None else window.size,
        "layer_types": layer_types(config),
    }


def layer_types(config: DecoderConfig) -> list[str]:
    """Return the type of each layer, in the form of the field `layer_types` of config.json."""
    return [SLIDING if windowed else FULL for windowed in config.windowed]


def shortest_period(flags: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest prefix of `flags` that generates it by repetition.

    This takes linear time (Knuth, Morris and Pratt 1977), since a damaged file may claim many
    layers.
    """
    longest = [0] * len(flags)  # the longest proper prefix that is a suffix of each prefix
    for index in range(1, len(flags)):
        length = longest[index - 1]
        while length and flags[index] != flags[length]:
            length = longest[length - 1]
        longest[index] = length + (flags[index] == flags[length])
    return tuple(flags[: len(flags) - longest[-1]])
