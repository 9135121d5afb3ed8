"""A head's config.json: the fields of its one Llama layer; unknown fields are errors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.formats.json_fields import Fields
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig

IDLE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields that do not change what a head computes."""

_NEUTRAL = {
    "hidden_act": "silu",
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_interleaved": False,
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
}
"""Fields that would change it, each with the one value that is supported."""

_DECODER = (
    "attention_bias",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)


def read_decoder(fields: Fields, target: Model, extra: Collection[str] = ()) -> DecoderConfig:
    """The one Llama layer that a config describes, with the target's vocabulary.

    `extra` fields are read by the caller. A vocabulary padded beyond the target's is truncated.
    Raises InputError for another kind of layer and for unknown fields.
    """
    fields.check_known({*_DECODER, *_NEUTRAL, *IDLE, *extra})
    if fields.values.get("model_type") not in (None, "llama"):
        raise fields.fail("model_type", "use a head whose layer is Llama's")
    for name, value in _NEUTRAL.items():
        if fields.values.get(name) not in (value, None):
            raise fields.fail(name, f"is not supported; only {value!r} is")
    stated, known = fields.whole("vocab_size"), target.config.vocab_size
    if stated < known:
        raise fields.fail("vocab_size", f"{target.name} has {known} tokens; use a head made for it")
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    positions = fields.whole("max_position_embeddings", 2048)
    theta, scaling = read_rope(Path(fields.where), dict(fields.values), positions)
    return DecoderConfig(
        vocab_size=known,
        hidden_size=width,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", max(width // heads, 1)),
        max_positions=positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        # The target's value: the field is about its embedding and head.
        tie_word_embeddings=target.config.tie_word_embeddings,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def decoder_fields(config: DecoderConfig, dtype: np.dtype) -> dict[str, Any]:
    """The fields that `read_decoder` reads, with the names of transformers 4 and 5."""
    rope = write_rope(config)
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
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
    }
