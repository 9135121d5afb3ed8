"""Medusa heads in the layout of FasterDecoding's `medusa_lm_head`, with vLLM's config keys.

Tensors are `{head}.{layer}.linear.weight` and `.bias` for the blocks and `{head}.{num_layers}
.weight` for the output head, or the same under vLLM's names. vLLM adds `truncated_vocab_size` with
the tensor `token_map` of token ids, `original_lm_head` with one `lm_head.weight` for all heads (a
copy of the target's), and `medusa_fc_bias`, without which it drops the biases. The layout has no
projection before the target's head, so the product of both is written as the head's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.heads import draft_vocabulary, shared_with_target
from specjax.methods.heads.checkpoint import Checkpoint, match
from specjax.methods.heads.config_fields import say_count
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.medusa.head import MedusaConfig

_BLOCK = re.compile(
    r"(?P<h>\d+)\.(?P<l>\d+)\.linear\.(weight|bias)"
    r"|blocks\.(?P<bh>\d+)\.layers\.(?P<bl>\d+)\.(?P<bp>weight|bias)"
)
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_IDLE = re.compile(r"medusa_\w+|max_paths|topk|max_medusa_\w+")
"""Matches the names of fields about training or trees, which do not affect the head."""


def is_medusa(names: Iterable[str]) -> bool:
    """Return whether any of the names is that of a Medusa block."""
    return any(_BLOCK.fullmatch(_short(name)) for name in names)


def _short(name: str) -> str:
    """Return a tensor's name without the prefix that it has in a complete Medusa model."""
    return re.sub(r"^medusa_heads?\.", "", name)


def _published(name: str, num_layers: int) -> str:
    """Return FasterDecoding's name of a tensor whose name may be vLLM's."""
    name = _short(name)
    if match := _HEAD.fullmatch(name):
        return f"{match[1]}.{num_layers}.weight"
    if (match := _BLOCK.fullmatch(name)) and match["bh"]:
        return f"{match['bh']}.{match['bl']}.linear.{match['bp']}"
    return name


def read(checkpoint: Checkpoint, target: Model, metadata: TargetMetadata, training: dict) -> Head:
    """Return the Medusa heads in a checkpoint.

    `metadata` identifies the target, and `training` is stored with the heads. Raises InputError for
    inconsistent fields or tensors.
    """
    where = checkpoint.directory
    fields = Fields(str(where / "config.json"), checkpoint.config)
    width, vocab_size = target.config.hidden_size, target.config.vocab_size
    if fields.count("hidden_size", width) != width:
        raise fields.fail("hidden_size", f"{target.name} has {width}; use a head made for it")
    heads, layers = _counts(where, checkpoint.tensors)
    for name, found in (
        ("num_heads", heads),
        ("medusa_num_heads", heads),
        ("medusa_num_layers", layers),
    ):
        say_count(fields, name, found)
    original = fields.flag("original_lm_head")
    tensors = {_published(name, layers): value for name, value in checkpoint.tensors.items()}
    if len(tensors) != len(checkpoint.tensors):
        raise InputError(f"{where}: two tensors have the same meaning; delete one of each pair")
    head_names = [f"{head}.{layers}.weight" for head in range(heads)]
    stated = _stated_tokens(fields, tensors.get(head_names[0]), vocab_size)
    if stated < vocab_size:
        raise fields.fail("vocab_size", f"{target.name} has {vocab_size} tokens")
    if original and head_names[0] in tensors:
        # vLLM uses the first head's for all of them.
        tensors["lm_head.weight"] = tensors.pop(head_names[0])
    names = [*head_names, "lm_head.weight"]
    ids = _read_ids(fields, tensors, stated)
    tensors, ids = draft_vocabulary.drop_padding(tensors, ids, names, stated, vocab_size)
    rows = vocab_size if ids is None else len(ids)
    if ids is not None:
        draft_vocabulary.check_ids(where, "token_map", ids, vocab_size)
        for name in names:
            if name in tensors and len(tensors[name]) == vocab_size != rows:
                tensors[name] = tensors[name][ids]
    blocks = [f"{head}.{layer}.linear" for head in range(heads) for layer in range(layers)]
    wanted: dict[str, tuple[int, ...]] = {f"{name}.weight": (width, width) for name in blocks}
    biased = any(name.endswith(".bias") for name in tensors)
    if biased != fields.flag("medusa_fc_bias", biased):
        raise fields.fail("medusa_fc_bias", f"the file has {'' if biased else 'no '}biases")
    if biased:
        wanted |= {f"{name}.bias": (width,) for name in blocks}
    if not original:
        wanted |= dict.fromkeys(head_names, (rows, width))
    match(where, tensors, wanted, ["token_map", *(["lm_head.weight"] if original else [])])
    if "lm_head.weight" in tensors:
        own = shared_with_target.target_head(target)
        shared_with_target.check_copy(
            *(where, "lm_head.weight", tensors["lm_head.weight"], own if ids is None else own[ids]),
            *(target, "all heads use (original_lm_head)"),
        )
    _check_fields(fields, target)
    draft_ids, order = draft_vocabulary.ascending(ids)
    kernels = np.stack([tensors[f"{name}.weight"].T for name in blocks])
    zeros = np.zeros(width, kernels.dtype)
    biases = np.stack([tensors.get(f"{name}.bias", zeros) for name in blocks])
    params: dict[str, Any] = {
        "blocks": {
            "kernel": kernels.reshape(heads, layers, width, width),
            "bias": biases.reshape(heads, layers, width),
        }
    }
    if not original:
        params["head"] = {"kernel": np.stack([tensors[name][order].T for name in head_names])}
    config = MedusaConfig(width, vocab_size, heads, layers, rows, original)
    return Head("medusa", config, params, draft_ids, metadata, training)


def _counts(where: Path, names: Iterable[str]) -> tuple[int, int]:
    """Return the number of heads, and of blocks per head, that the tensors' names imply.

    The config is not used: published ones state 2 heads for files with 5. Raises InputError if
    there are fewer tensors than the largest numbers imply.
    """
    blocks = [match for name in names if (match := _BLOCK.fullmatch(_short(name)))]
    heads = max(int(match["h"] or match["bh"]) for match in blocks) + 1
    layers = max(int(match["l"] or match["bl"]) for match in blocks) + 1
    if heads * layers > len(blocks):
        raise InputError(
            f"{where}: names of tensors number {heads} heads of {layers} blocks, and only "
            f"{len(blocks)} tensors are there; download it again"
        )
    return heads, layers


def _check_fields(fields: Fields, target: Model) -> None:
    """Raise InputError for a field that would change the head.

    Fields of the base model's config, which tools copy, are accepted.
    """
    base = {*implied(target.config), "max_position_embeddings", "tie_word_embeddings"}
    base |= {"rope_theta", "rope_scaling", "rope_parameters", "num_hidden_layers"}
    for name in fields.values:
        if name in base - {"logit_scale"} or _IDLE.fullmatch(name):
            fields.get(name)
    check_unread(fields, implied(target.config), "a Medusa head")


_MOST_PADDING = 1024
"""The most rows of padding; a head with more has another vocabulary than the target."""


def _stated_tokens(fields: Fields, head: np.ndarray | None, vocab_size: int) -> int:
    """Return the number of tokens, padding included, that a head was made for.

    It is stated in the config or, failing that, shown by the rows of the first head.
    """
    rows = 0 if head is None else len(head)
    padded = vocab_size < rows <= vocab_size + _MOST_PADDING
    return fields.count("vocab_size", rows if padded else vocab_size)


def _read_ids(fields: Fields, tensors: dict[str, np.ndarray], stated: int) -> np.ndarray | None:
    """Return the token ids in `token_map`, unchecked, or None for a head of all tokens."""
    ids = tensors.get("token_map")
    size = fields.count("truncated_vocab_size", stated)
    if ids is None:
        if size < stated:
            raise fields.fail("truncated_vocab_size", "the tensor token_map is missing")
        return None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != size:
        raise fields.fail(
            "truncated_vocab_size",
            f"the tensor token_map is {ids.dtype}{list(ids.shape)}, not as many token ids",
        )
    return ids.astype(np.int64)


def with_own_heads(head: Head, target: Model) -> Head:
    """Return a head in which projections are multiplied by the target's output head, in float32.

    The logits are the same. A head without projections is returned unchanged.
    """
    config = head.config
    assert isinstance(config, MedusaConfig)
    if not config.projection:
        return head
    rows = shared_with_target.target_head(target).astype(np.float32)
    rows = rows if head.draft_ids is None else rows[head.draft_ids]
    params = {name: value for name, value in head.params.items() if name != "projection"}
    kernels = np.asarray(head.params["projection"]["kernel"], np.float32)
    params["head"] = {"kernel": kernels @ rows.T}
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    config = dataclasses.replace(config, original_lm_head=False, projection=False)
    return dataclasses.replace(head, config=config, params=params)


def write(head: Head, target: Model) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and tensors of a head in the layout that `read` reads."""
    config = head.config
    assert isinstance(config, MedusaConfig)
    blocks, layers = head.params["blocks"], config.num_layers
    kernels, biases = np.asarray(blocks["kernel"]), np.asarray(blocks["bias"])
    tensors: dict[str, np.ndarray] = {}
    for index in range(config.num_heads):
        for layer in range(layers):
            tensors[f"{index}.{layer}.linear.weight"] = kernels[index, layer].T
            tensors[f"{index}.{layer}.linear.bias"] = biases[index, layer]
        if not config.original_lm_head:
            tensors[f"{index}.{layers}.weight"] = np.asarray(head.params["head"]["kernel"][index]).T
    if config.original_lm_head:
        # vLLM does not share it with the target.
        head_rows = shared_with_target.target_head(target)
        head_rows = head_rows if head.draft_ids is None else head_rows[head.draft_ids]
        tensors["lm_head.weight"] = head_rows
    if head.draft_ids is not None:
        tensors["token_map"] = np.asarray(head.draft_ids, np.int64)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": head.target.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "medusa_num_heads": config.num_heads,
        "num_hidden_layers": layers,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "original_lm_head": config.original_lm_head,
        "dtype": kernels.dtype.name,
        "torch_dtype": kernels.dtype.name,
    }, tensors
