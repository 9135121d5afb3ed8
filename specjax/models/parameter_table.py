"""The names, shapes and axes of a decoder's parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax

from specjax.models.config import DecoderConfig
from specjax.models.parameters import Parameter

UP_AXES = ("experts", "embed", "mlp")
DOWN_AXES = ("experts", "mlp", "embed")
"""The logical axes of experts' kernels."""


def parameter_table(config: DecoderConfig, scan_layers: bool = True) -> dict[str, Any]:
    """Return every parameter of a decoder as a nested dict of `Parameter`.

    Head axes are separate and kernels are [in, out]. Layers of one structure (`config.runs`) are
    stacked on the first axis; without `scan_layers` each layer is a separate entry "0", "1", ... A
    tied head and embedding are stored once, as the head [D, V], since the head reads all of it and
    the embedding only a few columns.
    """
    width = config.hidden_size
    table: dict[str, Any] = {
        "final_norm": norm_table(config),
        "head": {"kernel": Parameter((width, config.vocab_size), ("embed", "vocab"))},
    }
    for run in config.runs:
        layer = _layer(config, run.sparse)
        if scan_layers:
            stacked = functools.partial(Parameter.with_layers, count=run.count)
            table[run.name] = jax.tree.map(stacked, layer)
        else:
            layers = {str(run.first + index): layer for index in range(run.count)}
            table["layers"] = table.get("layers", {}) | layers
    if not config.tie_word_embeddings:
        table["embed"] = {"embedding": Parameter((config.vocab_size, width), ("vocab", "embed"))}
    if config.embedding.positions:
        shape = (config.max_positions, width)
        table["positions"] = {"embedding": Parameter(shape, ("positions", "embed"))}
    return table


def _layer(config: DecoderConfig, sparse: bool) -> dict[str, Any]:
    """Return the parameters of one layer; a `sparse` one has experts in place of the MLP."""
    width, head_dim = config.hidden_size, config.head_dim
    bias = config.attention_bias
    heads = ((width, config.num_heads, head_dim), ("embed", "heads", "head_dim"), 2)
    kv_heads = ((width, config.num_kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), 2)
    merged = ((config.num_heads, head_dim, width), ("heads", "head_dim", "embed"), 1)
    attention: dict[str, Any] = {
        "query": _linear(*heads, bias),
        "key": _linear(*kv_heads, bias),
        "value": _linear(*kv_heads, bias),
        "output": _linear(*merged, bias and config.attention.output_bias),
    }
    if config.attention.qk_norm:
        attention["query_norm"] = norm_table(config, head_dim, "head_dim")
        attention["key_norm"] = norm_table(config, head_dim, "head_dim")
    layer: dict[str, Any] = {
        "attention_norm": norm_table(config),
        "attention": attention,
        "mlp_norm": norm_table(config),
        "mlp": _experts(config) if sparse else _mlp(config),
    }
    if config.norm.after:
        layer["after_attention_norm"] = layer["after_mlp_norm"] = norm_table(config)
    return layer


def norm_table(
    config: DecoderConfig, size: int | None = None, axis: str = "embed"
) -> dict[str, Parameter]:
    """Return the parameters of a norm over `size` elements, by default D."""
    shape = (config.hidden_size if size is None else size,)
    entry = {"scale": Parameter(shape, (axis,), "zeros" if config.norm.offset else "ones")}
    if config.norm.kind == "layer":
        entry["bias"] = Parameter(shape, (axis,), "zeros")
    return entry


def _linear(
    shape: tuple[int, ...], axes: tuple[str, ...], outputs: int, bias: bool = False
) -> dict[str, Parameter]:
    """Return a kernel whose last `outputs` axes are outputs, and its bias if there is one."""
    entry = {"kernel": Parameter(shape, axes)}
    if bias:
        entry["bias"] = Parameter(shape[-outputs:], axes[-outputs:], "zeros")
    return entry


def _mlp(config: DecoderConfig) -> dict[str, Any]:
    width, hidden, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    up = ((width, hidden), ("embed", "mlp"), 1)
    table = {"up": _linear(*up, bias), "down": _linear((hidden, width), ("mlp", "embed"), 1, bias)}
    return {**table, "gate": _linear(*up, bias)} if config.mlp.gated else table


def _experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters of the router, the stacked experts and the shared MLP."""
    experts, width = config.experts, config.hidden_size
    assert experts is not None
    count = experts.num_experts

    def gated(hidden: int, *lead: int) -> dict[str, Any]:
        rank = 2 + len(lead)
        up = _linear((*lead, width, hidden), UP_AXES[-rank:], 1)
        return {"gate": up, "up": up, "down": _linear((*lead, hidden, width), DOWN_AXES[-rank:], 1)}

    table: dict[str, Any] = {
        "router": _linear((width, count), ("embed", "scores"), 1),
        "experts": gated(experts.intermediate_size, count),
    }
    if experts.selection_bias:
        # As in transformers, the bias that selects experts is not rounded.
        bias = Parameter((count,), ("scores",), "zeros", always="float32")
        table["router"]["selection_bias"] = bias
    if experts.shared_size:
        table["shared"] = gated(experts.shared_size)
    return table
