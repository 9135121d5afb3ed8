"""Tensors of EAGLE heads: names in SafeAILab's and the speculators layout, and locations.

Rotary halves are as in transformers, which is our own convention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import parameter_names, tensor_layout
from specjax.loading.head_formats import draft_vocabulary, shared_with_target
from specjax.loading.head_formats.checkpoint import match
from specjax.loading.heads.head import Head, parameter_shapes
from specjax.loading.model import Model
from specjax.models.heads.eagle import EagleConfig

_MODULES = {
    "fc": ("fc",),
    "{layer}.self_attn.q_proj": ("layer", "attention", "query"),
    "{layer}.self_attn.k_proj": ("layer", "attention", "key"),
    "{layer}.self_attn.v_proj": ("layer", "attention", "value"),
    "{layer}.self_attn.o_proj": ("layer", "attention", "output"),
    "{layer}.mlp.gate_proj": ("layer", "mlp", "gate"),
    "{layer}.mlp.up_proj": ("layer", "mlp", "up"),
    "{layer}.mlp.down_proj": ("layer", "mlp", "down"),
    "{layer}.post_attention_layernorm": ("layer", "mlp_norm"),
    "{layer}.input_layernorm": ("layer", "embedding_norm"),
    "{layer}.hidden_norm": ("layer", "hidden_norm"),
    "norm": ("final_norm",),
    "lm_head": ("head",),
    "input_norm": ("input_norm",),
    "embed_tokens": ("embed",),
}


def locations(config: EagleConfig, layer: str) -> dict[str, parameter_names.Location]:
    """Where each tensor of a head belongs, by name; its layer is "midlayer" or "layers.0"."""
    shapes = parameter_shapes(config)
    modules = {name.format(layer=layer): path for name, path in _MODULES.items()}
    modules |= {f"fc_norm.{tap}": ("fc_norm", str(tap)) for tap in range(len(config.taps))}
    found = {}
    for module, path in modules.items():
        for leaf, shape in (parameter_names.lookup(shapes, path) or {}).items():
            inputs = 0 if leaf != "kernel" else 2 if path[-1] == "output" else 1
            name = f"{module}.{'bias' if leaf == 'bias' else 'weight'}"
            entry = parameter_names.TensorEntry(name, (*path, leaf), inputs)
            found[name] = parameter_names.Location(name, entry, None, shape)
    return found


def named_tensors(head: Head, layer: str) -> dict[str, np.ndarray]:
    """A head's own tensors and its map, by the names of SafeAILab."""
    config = head.config
    assert isinstance(config, EagleConfig)
    tensors = {
        name: tensor_layout.to_stored(
            np.asarray(parameter_names.lookup(head.params, location.entry.path)), location
        )
        for name, location in locations(config, layer).items()
    }
    if config.decoder.attention_bias:
        # In transformers the flag also means a bias that our heads do not have.
        kernel = tensors[f"{layer}.self_attn.o_proj.weight"]
        tensors[f"{layer}.self_attn.o_proj.bias"] = np.zeros(len(kernel), kernel.dtype)
    if head.draft_ids is not None:
        tensors |= draft_vocabulary.offsets(head.draft_ids, config.decoder.vocab_size)
    return tensors


def without_padding(
    stored: dict[str, np.ndarray], stated: int, target: Model
) -> dict[str, np.ndarray]:
    """The tensors, those with a row for each of `stated` tokens truncated to the target's."""
    tensors = dict(stored)
    for name in ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t"):
        if name in tensors:
            tensors[name] = shared_with_target.drop_padding(
                tensors[name], stated, target.config.vocab_size
            )
    return tensors


def is_targets(
    name: str, tensors: dict[str, np.ndarray], target: Model, exactly: bool = False
) -> bool:
    """Whether a tensor equals the target's; with `exactly` bit for bit in the target's dtype."""
    embedding = name.startswith("embed_tokens")
    own = (
        shared_with_target.target_embedding(target)
        if embedding
        else shared_with_target.target_head(target)
    )
    stored = tensors[name].astype(target.dtype) if exactly else tensors[name]
    return tensor_layout.same_numbers(stored, own)


def read_params(
    where: Path,
    tensors: dict[str, np.ndarray],
    config: EagleConfig,
    layer: str,
    extra: tuple[str, ...],
) -> dict[str, Any]:
    """The parameter tree of the tensors; `extra` names are allowed and ignored."""
    table = locations(config, layer)
    bias = f"{layer}.self_attn.o_proj.bias"
    if config.decoder.attention_bias:
        extra = (*extra, bias)
        if np.any(tensors.get(bias, 0)):
            raise InputError(f"{where}: {bias} is not zero, and heads with it are not supported")
    match(where, tensors, {name: location.stored_shape for name, location in table.items()}, extra)
    params: dict[str, Any] = {}
    for name, location in table.items():
        *path, leaf = location.entry.path
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = tensor_layout.from_stored(tensors[name], location)
    return params
