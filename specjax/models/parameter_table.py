"""The names, shapes and logical axes of a decoder's parameters."""

from __future__ import annotations

import functools
from typing import Any

import jax

from specjax.models.config import DecoderConfig, Latent, LayerRun
from specjax.models.parameters import Parameter

UP_AXES = ("experts", "embed", "mlp")
DOWN_AXES = ("experts", "mlp", "embed")
"""The logical axes of the experts' kernels, before and after the activation."""
UP_BIAS_AXES = ("experts", "mlp")
"""The logical axes of the experts' biases before the activation."""


def parameter_table(config: DecoderConfig, scan_layers: bool = True) -> dict[str, Any]:
    """Return the shapes and logical axes of a decoder's parameters: nested dicts of `Parameter`.

    Kernels are matrices [in, out], some of them joined (`models.joined_kernels`). Layers of one
    structure (`config.runs`) are stacked on the first axis; without `scan_layers` each layer is a
    separate entry "0", "1", ... A tied head and embedding are stored once, as the head [D, V],
    since the head reads all of it and the embedding only a few columns.
    """
    width = config.hidden_size
    table: dict[str, Any] = {
        "final_norm": norm_table(config),
        "head": {"kernel": Parameter((width, config.vocab_size), ("embed", "vocab"))},
    }
    for run in config.runs:
        layer = _layer(config, run)
        if scan_layers:
            stacked = functools.partial(Parameter.with_layers, count=len(run.layers))
            table[run.name] = jax.tree.map(stacked, layer)
        else:
            layers = {str(index): layer for index in run.layers}
            table["layers"] = table.get("layers", {}) | layers
    if not config.tie_word_embeddings:
        table["embed"] = {"embedding": Parameter((config.vocab_size, width), ("vocab", "embed"))}
    if config.embedding.positions:
        shape = (config.max_positions, width)
        table["positions"] = {"embedding": Parameter(shape, ("positions", "embed"))}
    return table


def _layer(config: DecoderConfig, run: LayerRun) -> dict[str, Any]:
    """Return the parameters of one layer of a run."""
    layer: dict[str, Any] = {}
    if run.mlp:
        layer["mlp"] = _experts(config) if run.sparse else mlp_table(config)
    if run.mixer == "attention":
        layer["attention"] = attention_table(config, config.hidden_size)
    elif run.mixer == "recurrent":
        layer["recurrence"] = _recurrence(config)
    parts = ["attention"] * (run.mixer != "absent") + ["mlp"] * run.mlp
    before, after = config.norm.places(run.mixer)
    for part in parts:
        if before:
            layer[f"{part}_norm"] = norm_table(config)
        if after:
            layer[f"after_{part}_norm"] = norm_table(config)
    return layer


def attention_table(config: DecoderConfig, inputs: int) -> dict[str, Any]:
    """Return the parameters of attention, as a nested dict of `Parameter`.

    `inputs` is the width of the vectors that queries, keys and values are computed from.
    """
    if config.attention.latent is not None:
        return _latent_attention(config, config.attention.latent, inputs)
    heads, kv_heads, bias = config.num_heads, config.num_kv_heads, config.attention_bias
    merged, output_bias = heads * config.head_dim, bias and config.attention.output_bias
    outputs = merged * (1 + config.attention.gated) + 2 * kv_heads * config.head_dim
    table: dict[str, Any] = {
        "qkv": linear(inputs, outputs, axes=("embed", "heads"), bias=bias),
        "output": linear(merged, config.hidden_size, axes=("heads", "embed"), bias=output_bias),
    }
    if config.attention.qk_norm:
        width = 2 * config.head_dim, "head_dim"
        if config.attention.qk_norm_over == "projection":
            width = merged + kv_heads * config.head_dim, "heads"
        table["qk_norm"] = norm_table(config, *width)
    if config.attention.sink_logits:
        table["sinks"] = Parameter((heads,), ("heads",), "zeros")
    return table


def _recurrence(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters of the recurrent part of a layer.

    A mesh shards them by head (`Recurrence.blocks`); queries and keys of Mamba-2, which fewer heads
    may share, only if they divide too.
    """
    recurrence, width = config.recurrence, config.hidden_size
    assert recurrence is not None
    heads, key_heads = recurrence.value_heads, recurrence.key_heads
    inner, keys = heads * recurrence.value_width, key_heads * recurrence.key_width

    def vector(size: int, kind: str = "zeros", **options: Any) -> Parameter:
        return Parameter((size,), ("heads",), kind, blocks=recurrence.blocks, **options)

    def into(outputs: int, axis: str = "heads", blocks: int = recurrence.blocks) -> dict[str, Any]:
        return linear(width, outputs, axes=("embed", axis), bias=recurrence.bias, blocks=blocks)

    sizes = {"value": (inner, "heads", recurrence.blocks)}
    if recurrence.has_matrix:
        sizes |= dict.fromkeys(("query", "key"), (keys, "kv_heads", key_heads))
    table: dict[str, Any] = {"taps": {}, "taps_bias": {}}
    for part, (size, axis, blocks) in sizes.items():
        shape = size, 1, recurrence.conv_width
        table["taps"][part] = Parameter(shape, (axis, None, None), blocks=blocks)
        if recurrence.conv_bias:
            table["taps_bias"][part] = Parameter((size,), (axis,), "zeros", blocks=blocks)
    if not recurrence.conv_bias:
        del table["taps_bias"]
    table["output"] = linear(
        *(inner, width), axes=("heads", "embed"), bias=recurrence.bias, blocks=recurrence.blocks
    )
    if recurrence.kind == "conv":
        return {**table, "before_after_value": into(3 * inner)}
    table["log_rate"] = vector(heads, always="float32")
    table["rate_bias"] = vector(heads, "ones", always="float32")
    if recurrence.kind == "delta":
        return {
            **table,
            "qkvz": into(2 * keys + 2 * inner),
            "rates": into(2 * heads),
            "norm": {"scale": Parameter((recurrence.value_width,), (None,), "ones")},
        }
    return {
        **table,
        "value_gate_decay": into(2 * inner + heads),
        "query_key": into(2 * keys, "kv_heads", key_heads),
        "skip": vector(heads, "ones", always="float32"),
        "norm": {"scale": vector(inner, "ones")},
    }


def _latent_attention(config: DecoderConfig, latent: Latent, inputs: int) -> dict[str, Any]:
    """Return the parameters of latent attention; the arguments are those of `attention_table`."""
    heads, bias = config.num_heads, config.attention_bias
    queries, rotated = heads * config.head_dim, config.rotary_width
    keys_and_values = heads * (config.head_dim - rotated + latent.value_dim)
    down = functools.partial(linear, inputs, axes=("embed", None), bias=bias)
    up_axes = (None, "heads")
    output_bias = bias and config.attention.output_bias
    table: dict[str, Any] = {
        "kv_down": down(latent.kv_rank + rotated),
        "kv_latent_norm": norm_table(config, latent.kv_rank),
        "kv_up": linear(latent.kv_rank, keys_and_values, axes=up_axes),
        "output": linear(
            *(heads * latent.value_dim, config.hidden_size),
            axes=("heads", "embed"),
            bias=output_bias,
        ),
    }
    if latent.query_rank is None:
        return {**table, "query": linear(inputs, queries, axes=("embed", "heads"))}
    return {
        **table,
        "query_down": down(latent.query_rank),
        "query_latent_norm": norm_table(config, latent.query_rank),
        "query_up": linear(latent.query_rank, queries, axes=up_axes),
    }


def norm_table(
    config: DecoderConfig, size: int | None = None, axis: str = "embed"
) -> dict[str, Parameter]:
    """Return the parameters of a norm over `size` elements, by default D, by name.

    `axis` is the logical name of their axis.
    """
    shape = (config.hidden_size if size is None else size,)
    entry = {"scale": Parameter(shape, (axis,), "zeros" if config.norm.offset else "ones")}
    if config.norm.kind == "layer":
        entry["bias"] = Parameter(shape, (axis,), "zeros")
    return entry


def linear(
    *shape: int, axes: tuple[str | None, ...], bias: bool = False, blocks: int | None = None
) -> dict[str, Parameter]:
    """Return the parameters of a linear layer by name: a kernel and, if `bias`, a bias.

    `shape` is that of the kernel, [..., in, out], and `axes` are the logical names of its axes. An
    axis that is sharded consists of so many `blocks`, if that is not None.
    """
    table = {"kernel": Parameter(shape, axes, blocks=blocks)}
    if bias:
        table["bias"] = Parameter(shape[-1:], axes[-1:], "zeros", blocks=blocks)
    return table


def mlp_table(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters of the MLP: gate and up joined (or up without a gate), and down."""
    return _mlp(config.hidden_size, config.intermediate_size, config.mlp.gated, config.mlp_bias)


def _mlp(width: int, hidden: int, gated: bool, bias: bool = False) -> dict[str, Any]:
    name, outputs = ("gate_up", 2 * hidden) if gated else ("up", hidden)
    return {
        name: linear(width, outputs, axes=UP_AXES[1:], bias=bias),
        "down": linear(hidden, width, axes=DOWN_AXES[1:], bias=bias),
    }


def _experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters of the router, the stacked experts and the shared MLP."""
    experts, width = config.experts, config.hidden_size
    assert experts is not None
    count, hidden = experts.num_experts, experts.intermediate_size
    table: dict[str, Any] = {
        "router": linear(width, count, axes=("embed", "scores"), bias=experts.bias),
        "experts": {
            "gate_up": linear(count, width, 2 * hidden, axes=UP_AXES),
            "down": linear(count, hidden, width, axes=DOWN_AXES),
        },
    }
    if experts.bias:
        for name, axes in (("gate_up", UP_BIAS_AXES), ("down", (None, "embed"))):
            shape = (count, table["experts"][name]["kernel"].shape[-1])
            table["experts"][name]["bias"] = Parameter(shape, axes, "zeros")
    if experts.selection_bias:
        # As in transformers, the bias that selects experts is not rounded.
        bias = Parameter((count,), ("scores",), "zeros", always="float32")
        table["router"]["selection_bias"] = bias
    if experts.shared_size:
        table["shared"] = _mlp(width, experts.shared_size, gated=True)
    if experts.shared_gate:
        table["shared_gate"] = Parameter((1, width), (None, "embed"))
    return table
