"""What families share: the usual fields of config.json, and tables of tensor names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specjax.errors import InputError, shown
from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.formats.json_fields import Fields
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.models.config import MOST_LAYERS, DecoderConfig, SlidingWindow

_FULL, _SLIDING = "full_attention", "sliding_attention"

NAMES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "query": "model.layers.{layer}.self_attn.q_proj",
    "key": "model.layers.{layer}.self_attn.k_proj",
    "value": "model.layers.{layer}.self_attn.v_proj",
    "output": "model.layers.{layer}.self_attn.o_proj",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
}
"""Module names of Llama in Hugging Face's layout."""

QK_NORM_NAMES = {
    "query_norm": "model.layers.{layer}.self_attn.q_norm",
    "key_norm": "model.layers.{layer}.self_attn.k_norm",
}

GGUF_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{layer}.attn_norm",
    "mlp_norm": "blk.{layer}.ffn_norm",
    "query": "blk.{layer}.attn_q",
    "key": "blk.{layer}.attn_k",
    "value": "blk.{layer}.attn_v",
    "output": "blk.{layer}.attn_output",
    "gate": "blk.{layer}.ffn_gate",
    "up": "blk.{layer}.ffn_up",
    "down": "blk.{layer}.ffn_down",
}
"""Names of Llama in GGUF."""

GGUF_QK_NORM_NAMES = {
    "query_norm": "blk.{layer}.attn_q_norm",
    "key_norm": "blk.{layer}.attn_k_norm",
}


GGUF_EXPERT_NAMES = {
    ("router", "kernel"): "blk.{layer}.ffn_gate_inp.weight",
    ("experts", "gate", "kernel"): "blk.{layer}.ffn_gate_exps.weight",
    ("experts", "up", "kernel"): "blk.{layer}.ffn_up_exps.weight",
    ("experts", "down", "kernel"): "blk.{layer}.ffn_down_exps.weight",
}
"""Names of a router and of experts' kernels, merged in one tensor, in GGUF."""


def expert_names(block: str, gate: str, up: str, down: str) -> dict[tuple[str, ...], str]:
    """Names of a router and of experts' kernels, `block` being their module within a layer."""
    start = f"model.layers.{{layer}}.{block}"
    parts = {"gate": gate, "up": up, "down": down}
    kernels = {
        ("experts", part, "kernel"): f"{start}.experts.{{expert}}.{name}.weight"
        for part, name in parts.items()
    }
    return {("router", "kernel"): f"{start}.gate.weight", **kernels}


_NORMS = (
    "final_norm",
    "attention_norm",
    "mlp_norm",
    "after_attention_norm",
    "after_mlp_norm",
    "query_norm",
    "key_norm",
)
_LINEAR = {
    "query": ("attention", 1),
    "key": ("attention", 1),
    "value": ("attention", 1),
    "output": ("attention", 2),
    "gate": ("mlp", 1),
    "up": ("mlp", 1),
    "down": ("mlp", 1),
}
"""Linear layers: their part of a layer, and how many axes of a kernel are summed over."""


def table(
    names: Mapping[str, str],
    *,
    paired: bool = False,
    transposed: bool = False,
    norms_added: int = 0,
    fused: Collection[Sequence[str]] = (),
    names_of_experts: Mapping[tuple[str, ...], str] = MappingProxyType({}),
) -> tuple[TensorEntry, ...]:
    """The entries of a format, from the names of its modules.

    `paired` says that rotated dimensions of queries and keys are stored as neighbours, `transposed`
    that kernels are stored [in, out], `norms_added` what the file's norm scales have more than the
    tree's. Each of `fused` lists parts that one tensor holds in that order; they have one name.
    `names_of_experts` are whole names by the location within the MLP (`expert_names`); those of
    experts without `{expert}` are of tensors that hold all of them.
    """
    entries = [
        TensorEntry(names["embed"] + ".weight", ("head", "kernel"), 1, tied=True),
        TensorEntry(names["embed"] + ".weight", ("embed", "embedding"), tied=False),
        TensorEntry(names["head"] + ".weight", ("head", "kernel"), 1, tied=False),
    ]
    for part in _NORMS:
        if part in names:
            inside = ("attention",) if part in ("query_norm", "key_norm") else ()
            path = (part,) if part == "final_norm" else ("layers", *inside, part)
            entries.append(
                TensorEntry(names[part] + ".weight", (*path, "scale"), added=norms_added)
            )
            entries.append(TensorEntry(names[part] + ".bias", (*path, "bias")))
    for path, name in sorted(names_of_experts.items()):
        in_axes = 0 if path[-1] == "selection_bias" else 1
        merged = path[0] == "experts" and "{expert}" not in name
        entries.append(TensorEntry(name, ("layers", "mlp", *path), in_axes, merged=merged))
    positions = {part: (group.index(part), len(group)) for group in fused for part in group}
    for part, (block, in_axes) in _LINEAR.items():
        if part not in names:
            continue
        turned, share = paired and part in ("query", "key"), positions.get(part, (0, 1))
        path = ("layers", block, part)
        entries.append(
            TensorEntry(
                names[part] + ".weight",
                (*path, "kernel"),
                in_axes,
                turned,
                part=share,
                transposed=transposed,
            )
        )
        entries.append(TensorEntry(names[part] + ".bias", (*path, "bias"), 0, turned, part=share))
    if "positions" in names:
        entries.append(TensorEntry(names["positions"] + ".weight", ("positions", "embedding")))
    return tuple(entries)


def read_sizes(
    fields: Fields,
    *,
    head_dim: int | None = None,
    max_positions: int = 2048,
    tied: bool = False,
    epsilon: float = 1e-6,
) -> dict[str, Any]:
    """Sizes and epsilon as most families have them; the arguments are defaults of missing fields.

    Without `head_dim` it is D/H.
    """
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if head_dim is None:
        head_dim = width // max(heads, 1)
    return {
        "hidden_size": width,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", head_dim),
        "max_positions": fields.integer("max_position_embeddings", max_positions),
        "rms_norm_eps": fields.number("rms_norm_eps", epsilon),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def count_experts(fields: Fields, name: str) -> int:
    """The number of experts under the family's own name, or else under that of transformers 5."""
    stated = fields.values.get(name) is not None
    return fields.integer(name if stated else "num_local_experts", 128)


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The fields that `read_sizes` reads."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def read_one_rope(
    fields: Fields, max_positions: int, *, partial: float = 1.0, theta: float = 10000.0
) -> dict[str, Any]:
    """The rotary base and scaling of all layers, and the rotated part of a head's dimensions.

    `partial` and `theta` are the part and the base where config.json does not say them. Returns the
    fields of `DecoderConfig`, with the part under "partial".
    """
    raw = {name: fields.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    partial = fields.number("partial_rotary_factor", partial)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(raw[name], dict) and "partial_rotary_factor" in raw[name]:
            partial = fields.section(name).number("partial_rotary_factor", partial)
            raw[name] = {
                key: value for key, value in raw[name].items() if key != "partial_rotary_factor"
            }
    if raw["rope_theta"] is None:
        raw["rope_theta"] = theta
    theta, scaling = read_rope(Path(fields.where), raw, max_positions)
    return {"rope_theta": theta, "rope_scaling": scaling, "partial": partial}


def read_full_rope(fields: Fields, max_positions: int, theta: float = 10000.0) -> dict[str, Any]:
    """`read_one_rope` for families that rotate all of a head's dimensions."""
    rope = read_one_rope(fields, max_positions, theta=theta)
    if (partial := rope.pop("partial")) != 1.0:
        raise InputError(
            f"{fields.where}: partial_rotary_factor={shown(partial)}: is not supported; this "
            "family rotates all dimensions"
        )
    return rope


def write_one_rope(config: DecoderConfig, **more: Any) -> dict[str, Any]:
    """The rotary base and scaling with the names of transformers 4 and 5; `more` goes inside."""
    rope = write_rope(config)
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, **more, "rope_theta": config.rope_theta},
    }


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
        if not isinstance(types, list) or not set(map(str, types)) <= {_FULL, _SLIDING}:
            raise fields.fail(
                "layer_types", f"is not supported; the decoder supports {_FULL} and {_SLIDING}"
            )
        if len(types) != num_layers:
            raise fields.fail("layer_types", f"must have an entry for each of {num_layers} layers")
        windowed = tuple(kind == _SLIDING for kind in types)
    if not any(windowed):
        return None
    if size is None:
        raise fields.fail("sliding_window", "is missing, and layer_types names sliding layers")
    return SlidingWindow(size, shortest_period(windowed))


def layers(num_layers: int) -> range:
    """The layers of a config that may be damaged: no more than `DecoderConfig` accepts."""
    return range(min(num_layers, MOST_LAYERS))


def layer_types(config: DecoderConfig) -> list[str]:
    """The type of each layer, as `read_window` reads it."""
    return [_SLIDING if own else _FULL for own in config.windowed]


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
