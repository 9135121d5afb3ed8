"""Rotary base and scaling in config.json, with the field names of transformers 4 and 5."""

from __future__ import annotations

from typing import Any, NamedTuple

from specjax.errors import InputError, shown
from specjax.loading.typed_fields import Fields, is_empty, is_number
from specjax.models.config import DecoderConfig, RopeScaling

_PARTIAL = "partial_rotary_factor"
_OLDER, _NEWER = "rope_scaling", "rope_parameters"
_KNOWN = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    _PARTIAL,
    "attention_factor",
    "short_factor",
    "long_factor",
}


class Rope(NamedTuple):
    """The rotary base, its scaling, and the rotated fraction of a head's dimensions."""

    theta: float
    scaling: RopeScaling | None
    partial: float


def read_rope(
    fields: Fields, max_positions: int, *, theta: float = 10000.0, partial: float | None = None
) -> Rope:
    """Return the rotary settings in `rope_parameters` (transformers 5) or in the older fields.

    `theta` and `partial` are defaults. If `partial` is None, the model rotates all dimensions, and
    another fraction raises InputError, as do old and new fields that contradict each other.
    """
    theta = fields.number("rope_theta", theta)
    rotated = fields.number(_PARTIAL, 1.0 if partial is None else partial)
    older = _read_section(fields, _OLDER, Rope(theta, None, rotated), max_positions)
    rope = older
    if fields.get(_NEWER) is not None:
        start = Rope(theta, None, older.partial)
        rope = _read_section(fields, _NEWER, start, max_positions)
        if fields.get(_OLDER) is not None and rope.scaling != older.scaling:
            newer = shown(fields.get(_NEWER), 200)
            raise fields.fail(
                _OLDER, f"{_NEWER}={newer} says something else; leave one of the two out"
            )
    if partial is None and rope.partial != 1.0:
        raise InputError(
            f"{fields.where}: {_PARTIAL}={rope.partial}: is not supported; models of this kind "
            "rotate all dimensions"
        )
    return rope


def _read_section(fields: Fields, name: str, default: Rope, max_positions: int) -> Rope:
    """Return the settings in the object `name` of config.json; missing ones are as in `default`."""
    rope = fields.get(name) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise fields.fail(name, "must be one set of values for all layers")

    def number(key: str, default: float | None = None) -> float:
        value = default if rope.get(key) is None else rope[key]
        if not is_number(value):
            raise fields.fail(name, f"{key} must be a number")
        return float(value)

    unknown = sorted(key for key in rope.keys() - _KNOWN if not is_empty(rope[key]))
    if unknown:
        raise fields.fail(name, f"{unknown[0]} is unknown; use a model without it")
    theta, partial = number("rope_theta", default.theta), number(_PARTIAL, default.partial)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return Rope(theta, None, partial)
    if kind == "linear":
        return Rope(theta, RopeScaling("linear", factor=number("factor")), partial)
    original = rope.get("original_max_position_embeddings", max_positions)
    if type(original) is not int:
        raise fields.fail(name, "original_max_position_embeddings must be a whole number")
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_positions=original,
        )
        return Rope(theta, scaling, partial)
    factors = rope.get("long_factor")
    same = isinstance(factors, list) and factors == rope.get("short_factor")
    if kind == "longrope" and rope.get("attention_factor") == 1.0 and same:
        # One set of factors for every length: how `write_scaling` spells the factors of a GGUF.
        if not all(map(is_number, factors)):
            raise fields.fail(name, "the factors must be numbers")
        scaling = RopeScaling("factors", factors=tuple(map(float, factors)))
        return Rope(theta, scaling, partial)
    raise fields.fail(name, "this rope_type is not supported; use default, linear or llama3")


def write_rope(config: DecoderConfig, **more: Any) -> dict[str, Any]:
    """Return the fields that `read_rope` reads; `more` is added to `rope_parameters`."""
    scaling = write_scaling(config)
    return {
        "rope_theta": config.rope_theta,
        _OLDER: None if config.rope_scaling is None else scaling,
        _NEWER: {**scaling, **more, "rope_theta": config.rope_theta},
        **more,
    }


def write_scaling(config: DecoderConfig) -> dict[str, Any]:
    """Return the scaling as an object of config.json, without the rotary base."""
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
