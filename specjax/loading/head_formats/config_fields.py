"""A head's config.json: the fields of its one Llama layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.model import Model
from specjax.loading.notes import note
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_LAYERS = re.compile(r"layers\.(\d+)\.")


def read_decoder(
    fields: Fields, target: Model, names: Iterable[str], extra: Collection[str] = ()
) -> DecoderConfig:
    """The one Llama layer that a config describes, with the target's vocabulary.

    `names` are those of the tensors, which tell the number of layers whatever the config states,
    and where it states nothing whether queries, keys and values have biases; `extra` fields are
    read by the caller. A vocabulary padded beyond the target's is truncated.
    Raises InputError for another kind of layer and for fields that would change it.
    """
    names = list(names)
    # EAGLE's code for Qwen2 copies the target's type; its layer is Llama's with biases.
    if fields.get("model_type") not in (None, "llama", "qwen2"):
        raise fields.fail("model_type", "use a head whose layer is Llama's")
    layers = max((int(found[1]) for found in map(_LAYERS.match, names) if found), default=0) + 1
    if layers > 1:
        raise InputError(
            f"{fields.where}: the file has {layers} layers, and heads of one layer are supported; "
            "use such a head"
        )
    say_count(fields, "num_hidden_layers", layers)
    for name in ("tie_word_embeddings", *extra):
        fields.get(name)
    stated, known = fields.count("vocab_size"), target.config.vocab_size
    if stated < known:
        raise fields.fail("vocab_size", f"{target.name} has {known} tokens; use a head made for it")
    biased = fields.flag("qkv_bias", any(name.endswith(".q_proj.bias") for name in names))
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    positions = fields.count("max_position_embeddings", 2048)
    rope = read_rope(fields, positions)
    decoder = DecoderConfig(
        vocab_size=known,
        hidden_size=width,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", max(width // heads, 1)),
        max_positions=positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        # The target's value: the field is about its embedding and head.
        tie_word_embeddings=target.config.tie_word_embeddings,
        attention_bias=fields.flag("attention_bias", biased),
        mlp_bias=fields.flag("mlp_bias"),
    )
    check_unread(fields, implied(decoder), "a head's layer")
    return decoder


def say_count(fields: Fields, name: str, found: int) -> None:
    """Say in a line where a config states another number of something than its file has."""
    stated = fields.get(name)
    if stated not in (None, found):
        fields.integer(name)
        note(f"{fields.where}: {name}={stated}, and the file has {found}: these are used")


def decoder_fields(config: DecoderConfig, dtype: np.dtype) -> dict[str, Any]:
    """The fields that `read_decoder` reads, with the names of transformers 4 and 5."""
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        **write_rope(config),
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
    }
