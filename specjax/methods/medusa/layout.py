"""Medusa heads in the layout of FasterDecoding's `medusa_lm_head`, with vLLM's config keys.

Tensors are `{head}.{block}.linear.weight` and `.bias` for the blocks and `{head}.{num_layers}
.weight` for the output head, or the same under vLLM's names. vLLM adds `truncated_vocab_size` with
the tensor `token_map` of token ids, `original_lm_head` with one `lm_head.weight` for all heads (a
copy of the target's), and `medusa_fc_bias`, without which it drops the biases. The layout has no
projection before the target's head, so the product of both is written as the head's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Values
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.loading.formats.unread_fields import implied
from specjax.loading.model import Model
from specjax.methods.heads.checkpoint import MEDUSA_WEIGHTS
from specjax.methods.heads.config_fields import Export, HeadFields, HeadPart
from specjax.methods.heads.draft_vocabulary import TOKEN_MAP
from specjax.methods.heads.head import Head
from specjax.methods.heads.published_layout import Copy, PublishedLayout, Signs
from specjax.methods.heads.shared_with_target import target_head
from specjax.methods.medusa.head import MedusaConfig

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OF_VLLM = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD_OF_VLLM = re.compile(r"lm_heads\.(\d+)\.weight")
_PREFIX = r"medusa_heads?\."
"""Matches what begins the names of tensors in a complete Medusa model."""
_IDLE = re.compile(r"medusa_\w+|max_paths|topk|max_medusa_\w+")
"""Matches the names of fields about training or trees, which do not affect the head."""
_HEAD = "lm_head.weight"
_MOST_PADDING = 1024
"""The most rows of padding; a head with more has another vocabulary than the target."""


def _renamed(names: Collection[str]) -> Mapping[str, str]:
    """Return FasterDecoding's names of tensors whose names may be vLLM's or those of a model."""
    short = {name: re.sub(f"^{_PREFIX}", "", name) for name in names}
    found = {name: _OF_VLLM.sub(r"\1.\2.linear.\3", one) for name, one in short.items()}
    _, layers, _ = _numbered(found.values())
    return {name: _HEAD_OF_VLLM.sub(rf"\g<1>.{layers}.weight", one) for name, one in found.items()}


def _numbered(names: Collection[str]) -> tuple[int, int, int]:
    """Return how many heads, and blocks per head, names imply, and the number of blocks' tensors.

    The config is not used: published ones state 2 heads for files with 5.
    """
    blocks = [match for name in names if (match := _BLOCK.fullmatch(name))]
    heads, layers = (max((int(match[at]) for match in blocks), default=0) + 1 for at in (1, 2))
    return heads, layers, len(blocks)


def _read_sizes(fields: HeadFields, known: Values) -> Values:
    """Return the sizes that tensors and target show, and whether heads use the target's output.

    The number of tokens is stated, or shown by the rows of the first head. Raises InputError if
    there are fewer tensors than the largest numbers imply, and for a head of another target.
    """
    target, (heads, layers, found) = fields.target, _numbered(fields.tensors)
    width, vocab_size = target.config.hidden_size, target.config.vocab_size
    if heads * layers > found:
        raise InputError(
            f"{fields.directory}: names of tensors number {heads} heads of {layers} blocks, and "
            f"only {found} tensors are there; download it again"
        )
    for name, count in {"num_heads": heads, **_named(heads, layers)}.items():
        fields.say_count(name, count)
    if fields.count("hidden_size", width) != width:
        raise fields.misfit("hidden_size", width)
    name, original = f"0.{layers}.weight", fields.flag("original_lm_head")
    first = fields.tensors.get(name)
    rows = 0 if first is None or not first.ndim else len(first)
    fields.read_tokens(rows if vocab_size < rows <= vocab_size + _MOST_PADDING else vocab_size)
    if original and first is not None:
        # vLLM uses the first head's for all of them.
        fields.tensors[_HEAD] = fields.tensors.pop(name)
    biased = any(name.endswith(".bias") for name in fields.tensors)
    fields.agree("medusa_fc_bias", biased, f"the file has {'' if biased else 'no '}biases")
    sizes = {"hidden_size": width, "vocab_size": vocab_size, "original_lm_head": original}
    return {**sizes, "num_heads": heads, "num_layers": layers}


def _write_sizes(export: Export) -> dict[str, Any]:
    config = export.config
    return {
        "base_model_name_or_path": export.head.target.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        **_named(config.num_heads, config.num_layers),
        "original_lm_head": config.original_lm_head,
        "dtype": export.dtype,
        "torch_dtype": export.dtype,
    }


def _named(heads: int, layers: int) -> dict[str, int]:
    return {"medusa_num_heads": heads, "medusa_num_layers": layers}


def _read_base(fields: HeadFields, known: Values) -> Values:
    """Accept fields of the base model's config, which tools copy."""
    base = {*implied(fields.target.config), "max_position_embeddings", "tie_word_embeddings"}
    base |= {"rope_theta", "rope_scaling", "rope_parameters", "num_hidden_layers"}
    idle = {name for name in fields.values if _IDLE.fullmatch(name)}
    fields.asked |= (base - {"logit_scale"}) | idle
    return {}


def _with_own_heads(head: Head, target: Model, format: str) -> Head:
    """Return a head in which projections are multiplied by the target's output head, in float32.

    The logits are the same. A head without projections is returned unchanged.
    """
    config = head.config
    if not config.projection:
        return head
    rows = target_head(target, head.draft_ids).astype(np.float32)
    params = {name: value for name, value in head.params.items() if name != "projection"}
    kernels = np.asarray(head.params["projection"]["kernel"], np.float32)
    params["head"] = {"kernel": kernels @ rows.T}
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    config = dataclasses.replace(config, original_lm_head=False, projection=False)
    return dataclasses.replace(head, config=config, params=params)


_MEDUSA = PublishedLayout(
    name="medusa",
    kind="medusa",
    config=MedusaConfig,
    signs=Signs((rf"({_PREFIX})?({_BLOCK.pattern}|{_OF_VLLM.pattern})",)),
    fields={
        "": (
            schema.written({"architectures": ["MedusaModel"], "model_type": "medusa"}),
            HeadPart(_read_sizes, _write_sizes),
            schema.written({"medusa_fc_bias": True}),
            HeadPart(_read_base),
        )
    },
    tensors=(
        TensorEntry("{head}.{block}.linear.weight", ("blocks", "kernel")),
        TensorEntry("{head}.{block}.linear.bias", ("blocks", "bias")),
        TensorEntry("{head}.{config.num_layers}.weight", ("head", "kernel")),
    ),
    what="a Medusa head",
    vocabulary=TOKEN_MAP,
    optional=(("blocks", "bias"),),
    copies=(
        # vLLM does not share it with the target.
        Copy(
            _HEAD,
            "head",
            "all heads use (original_lm_head)",
            written=lambda head: head.config.original_lm_head,
        ),
    ),
    renamed=_renamed,
    prepare=_with_own_heads,
    weights=MEDUSA_WEIGHTS,
)
LAYOUTS = (_MEDUSA,)
