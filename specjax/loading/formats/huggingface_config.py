"""config.json of a Llama model, with the field names of transformers 4 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.tokenizers.huggingface_tokenizer import end_fields, read_json, write_json
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig, RopeScaling

_LARGEST = 10**30  # JSON has whole numbers that no float holds


def read_config(directory: Path, vocab_size: int | None) -> DecoderConfig:
    """The decoder that config.json describes, with V truncated to `vocab_size` where that is known.

    Reads the fields of transformers 4 and 5. Raises InputError for another model type and for
    settings that the decoder does not have, by name.
    """
    path = directory / "config.json"
    raw = read_json(path)
    if not raw:
        raise InputError(
            f"{path}: missing or empty; give a .gguf file or a directory with config.json, "
            "model.safetensors and tokenizer.json"
        )

    def fail(field: str, remedy: str) -> InputError:
        return InputError(f"{path}: {field}={shown(raw.get(field))} is not supported; {remedy}")

    if raw.get("model_type") != "llama":
        raise fail("model_type", "use a model of the type 'llama'")
    if raw.get("architectures") not in (None, ["LlamaForCausalLM"]):
        raise fail("architectures", "use a LlamaForCausalLM checkpoint")
    neutral = {
        "hidden_act": "silu",
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "rope_interleaved": False,
        "layer_types": ["full_attention"] * _size(raw.get("layer_types")),
    }
    for field, value in neutral.items():
        if raw.get(field) not in (value, None):
            raise fail(field, f"the decoder supports only {shown(value)}")

    if raw.get("num_nextn_predict_layers") not in (0, None):
        raise fail(
            "num_nextn_predict_layers",
            "MTP layers are not read from this layout; delete them and the field to use the model "
            "without them",
        )

    def number(field: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = raw.get(field)
        value = default if value is None else value
        if type(value) not in kinds or abs(value) > _LARGEST:
            raise InputError(
                f"{path}: {field}={shown(value)}: must be a number; repair config.json"
            )
        return value

    def flag(field: str) -> bool:
        value = raw.get(field, False)
        if not isinstance(value, bool):
            raise InputError(f"{path}: {field}={shown(value)}: must be true or false")
        return value

    width, heads = number("hidden_size", (int,)), number("num_attention_heads", (int,))
    stated = number("vocab_size", (int,))
    if vocab_size is not None and vocab_size > stated:
        raise InputError(
            f"{path}: vocab_size={shown(stated)}, but the tokenizer has {vocab_size} tokens; "
            "use the model's own tokenizer files"
        )
    max_positions = number("max_position_embeddings", (int,), 2048)
    theta, scaling = _read_rope(path, raw, max_positions)
    return DecoderConfig(
        vocab_size=stated if vocab_size is None else vocab_size,
        hidden_size=width,
        intermediate_size=number("intermediate_size", (int,)),
        num_layers=number("num_hidden_layers", (int,)),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", (int,), heads),
        head_dim=number("head_dim", (int,), width // max(heads, 1)),
        max_positions=max_positions,
        rms_norm_eps=float(number("rms_norm_eps", (int, float), 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=flag("tie_word_embeddings"),
        attention_bias=flag("attention_bias"),
        mlp_bias=flag("mlp_bias"),
    )


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _read_rope(
    path: Path, raw: dict[str, Any], max_positions: int
) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the older pair of fields."""
    field = "rope_scaling" if raw.get("rope_parameters") is None else "rope_parameters"
    rope = raw.get(field) or {}

    def fail(reason: str) -> InputError:
        return InputError(f"{path}: {field}={shown(rope, 200)}: {reason}")

    def number(name: str, default: float | None = None) -> float:
        value = rope.get(name, default)
        if type(value) not in (int, float) or abs(value) > _LARGEST:
            raise fail(f"{name} must be a number")
        return float(value)

    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise fail("must be one set of values for all layers")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    if type(theta) not in (int, float) or abs(theta) > _LARGEST:
        raise InputError(f"{path}: rope_theta={shown(theta)}: must be a number; repair config.json")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise fail("partial_rotary_factor must be 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind == "linear":
        return float(theta), RopeScaling("linear", factor=number("factor"))
    original = rope.get("original_max_position_embeddings", max_positions)
    if type(original) is not int:
        raise fail("original_max_position_embeddings must be a whole number")
    if kind == "llama3":
        return float(theta), RopeScaling(
            "llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_positions=original,
        )
    if kind == "longrope" and rope.get("attention_factor") == 1.0:
        # One set of factors for every length: how `write_config` spells the factors of a GGUF.
        factors = rope.get("long_factor")
        if factors == rope.get("short_factor") and isinstance(factors, list):
            if not all(type(value) in (int, float) and value < _LARGEST for value in factors):
                raise fail("the factors must be numbers")
            return float(theta), RopeScaling("factors", factors=tuple(map(float, factors)))
    raise fail("this rope_type is not supported; use default, linear or llama3")


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": list(scaling.factors),
        "long_factor": list(scaling.factors),
        "original_max_position_embeddings": config.max_positions,
    }


def write_config(
    config: DecoderConfig, tokenizer: Tokenizer | None, dtype: np.dtype, directory: Path
) -> None:
    """Write config.json with the rope and dtype fields of both transformers 4 and 5."""
    rope = _write_rope(config)
    write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.rms_norm_eps,
            "hidden_act": "silu",
            "rope_theta": config.rope_theta,
            "rope_scaling": None if config.rope_scaling is None else rope,
            "rope_parameters": {**rope, "rope_theta": config.rope_theta},
            "tie_word_embeddings": config.tie_word_embeddings,
            "attention_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "dtype": dtype.name,
            "torch_dtype": dtype.name,
            **end_fields(tokenizer),
        },
    )
