"""Rotary base and scaling in config.json, with the field names of transformers 4 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specjax.errors import InputError, shown
from specjax.loading.formats.json_fields import LARGEST, is_empty
from specjax.models.config import DecoderConfig, RopeScaling

_KNOWN = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
    "short_factor",
    "long_factor",
}


def read_rope(
    path: Path, raw: dict[str, Any], max_positions: int
) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the older pair of fields.

    Raises InputError where both say a scaling, and not the same one.
    """
    parameters, older = raw.get("rope_parameters"), raw.get("rope_scaling")
    if parameters is not None and older is not None:
        theta, scaling = read_rope(path, {**raw, "rope_scaling": None}, max_positions)
        if read_rope(path, {**raw, "rope_parameters": None}, max_positions)[1] != scaling:
            raise InputError(
                f"{path}: rope_scaling={shown(older, 200)}: rope_parameters="
                f"{shown(parameters, 200)} says something else; leave one of the two out"
            )
        return theta, scaling
    field = "rope_scaling" if parameters is None else "rope_parameters"
    rope = raw.get(field) or {}

    def fail(reason: str) -> InputError:
        return InputError(f"{path}: {field}={shown(rope, 200)}: {reason}")

    def number(name: str, default: float | None = None) -> float:
        value = rope.get(name, default)
        if type(value) not in (int, float) or abs(value) > LARGEST:
            raise fail(f"{name} must be a number")
        return float(value)

    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise fail("must be one set of values for all layers")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = 10000.0 if theta is None else theta
    if type(theta) not in (int, float) or abs(theta) > LARGEST:
        raise InputError(f"{path}: rope_theta={shown(theta)}: must be a number; repair config.json")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise fail("partial_rotary_factor must be 1")
    unknown = sorted(name for name in rope.keys() - _KNOWN if not is_empty(rope[name]))
    if unknown:
        raise fail(f"{unknown[0]} is unknown; use a model without it")
    kind = rope.get("rope_type") or rope.get("type") or "default"
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
            if not all(type(value) in (int, float) and value < LARGEST for value in factors):
                raise fail("the factors must be numbers")
            return float(theta), RopeScaling("factors", factors=tuple(map(float, factors)))
    raise fail("this rope_type is not supported; use default, linear or llama3")


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """The scaling as the object that `read_rope` reads, without the base."""
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
