"""Rotary base and scaling in config.json, with the field names of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from specjax.errors import InputError, shown
from specjax.loading.typed_fields import Fields, is_empty, is_number
from specjax.loading.user_messages import note
from specjax.models.config import DecoderConfig, RopeScaling

_PARTIAL = "partial_rotary_factor"
_OLDER, _NEWER = "rope_scaling", "rope_parameters"
_ORIGINAL = "original_max_position_embeddings"
_KNOWN = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    _ORIGINAL,
    _PARTIAL,
    "attention_factor",
    "short_factor",
    "long_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    # The three positions of a text's token are equal, so that it has no effect.
    "mrope_section",
    "mrope_interleaved",
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
    another fraction raises InputError, as do old and new fields that contradict each other. A line
    is logged if yarn allows more than `max_positions`.
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
    scaling = rope.scaling
    if scaling is not None and scaling.kind == "yarn":
        extended = scaling.factor * scaling.original_max_positions
        if extended > max_positions:  # cards of Qwen models say to add the scaling alone
            note(
                f"{fields.where}: yarn extends the model to {extended:.0f} positions, but rows end "
                f"at max_position_embeddings={max_positions}: raise that for longer rows"
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
    original = next(
        (value for value in (fields.get(_ORIGINAL), rope.get(_ORIGINAL)) if value is not None),
        max_positions,
    )
    if type(original) is not int or original < 1:
        raise fields.fail(name, f"{_ORIGINAL} must be a whole number of at least 1")
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_positions=original,
        )
        return Rope(theta, scaling, partial)
    if kind not in ("yarn", "longrope"):
        supported = "default, linear, llama3, yarn or longrope"
        raise fields.fail(name, f"this rope_type is not supported; use {supported}")
    factor = number("factor", max_positions / original)
    if not factor > 0:
        raise fields.fail(name, "factor must be a positive number")
    if kind == "yarn":
        truncate = rope.get("truncate", True)
        if type(truncate) is not bool:
            raise fields.fail(name, "truncate must be true or false")
        usual = yarn_attention_factor(factor)
        if all(scales := [number(key, 0.0) for key in ("mscale", "mscale_all_dim")]):
            of_one, of_all = (yarn_attention_factor(factor, scale) for scale in scales)
            usual = of_one / of_all
        scaling = RopeScaling(
            "yarn",
            factor=factor,
            original_max_positions=original,
            attention_factor=number("attention_factor", usual),
            beta_fast=number("beta_fast", 0.0) or 32.0,
            beta_slow=number("beta_slow", 0.0) or 1.0,
            truncate=truncate,
        )
        return Rope(theta, scaling, partial)
    long, short = rope.get("long_factor"), rope.get("short_factor")
    for factors in (long, short):
        if not isinstance(factors, list) or not all(map(is_number, factors)):
            raise fields.fail(name, "short_factor and long_factor must be lists of numbers")
    usual = 1.0
    if factor > 1 and original > 1:
        usual = math.sqrt(1 + math.log(factor) / math.log(original))
    scaling = RopeScaling(
        "factors",
        factors=tuple(map(float, long)),
        attention_factor=number("attention_factor", usual),
    )
    if short != long:
        short = tuple(map(float, short))
        scaling = replace(scaling, short_factors=short, original_max_positions=original)
    return Rope(theta, scaling, partial)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's attention factor for `factor` times the context (2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


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
            _ORIGINAL: scaling.original_max_positions,
        }
    if scaling.kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            _ORIGINAL: scaling.original_max_positions,
        }
    short = scaling.short_factors
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": scaling.attention_factor,
        "short_factor": list(short or scaling.factors),
        "long_factor": list(scaling.factors),
        _ORIGINAL: scaling.original_max_positions if short else config.max_positions,
    }
