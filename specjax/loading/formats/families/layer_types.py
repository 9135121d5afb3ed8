"""Windows and rotary settings by type of layer, for families that state both for each type.

A layer is of full attention, or slides a window. Only the former scale their rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import FULL, SLIDING, Part, Values
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.formats.huggingface_rope import (
    Rope,
    read_rope,
    write_rope,
    write_scaling,
)
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_SIZE = 4096


def by_layer_type(
    period: int,
    theta: float,
    *,
    local_theta: float | None = None,
    local_field: str | None = None,
    period_fields: tuple[str, ...] = (),
    read_gguf: Callable[[GgufFields, Values], Values] = schema.nothing,
) -> Part:
    """Return a part for the sliding window and for the ropes of both types of layers.

    Without `layer_types` in config.json, every layer but each `period`-th has a window; of
    `period_fields` the last that is stated is the period instead. `theta` is the default rotary
    base of layers without a window. That of layers with one is in the older field `local_field`, by
    default `local_theta`; without such a field it is the base of the others.
    """

    def read_ropes(fields: Fields, max_positions: int) -> tuple[Rope, float]:
        """Return the rope of layers without a window, and the rotary base of layers with one."""
        base = fields.number("rope_theta", theta)
        local = base if local_field is None else fields.number(local_field, local_theta)
        full = {"rope_theta": base, "rope_scaling": fields.get("rope_scaling")}
        both = fields.section("rope_parameters")
        if both.values:
            full["rope_parameters"] = {"rope_theta": base, **both.section(FULL).values}
            sliding = {"rope_theta": local, **both.section(SLIDING).values}
            if unknown := sorted(both.values.keys() - both.asked):
                raise both.unknown(unknown, f"use {FULL} and {SLIDING}")
            rope = read_rope(Fields(fields.where, {"rope_parameters": sliding}), max_positions)
            if rope.scaling is not None:
                raise both.fail(SLIDING, "is not supported; only the default rope_type is")
            local = rope.theta
        return read_rope(Fields(fields.where, full), max_positions), local

    def read(fields: Fields, known: Values) -> Values:
        num_layers, stated = known["num_layers"], period
        size = fields.integer("sliding_window", _SIZE)
        for name in period_fields:
            stated = fields.count(name, stated)
        windowed = [(layer + 1) % stated != 0 for layer in schema.layers(num_layers)]
        window = schema.read_window(fields, size, num_layers, windowed)
        rope, local = read_ropes(fields, known["max_positions"])
        return {
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "sliding_window": window and replace(window, rope_theta=local),
        }

    def write(config: DecoderConfig) -> dict[str, Any]:
        window, scaling = config.sliding_window, write_scaling(config)
        local = config.rope_theta if local_theta is None else local_theta
        if window is not None and window.rope_theta is not None:
            local = window.rope_theta
        return {
            **schema.write_window(config),
            # If no layer has a window, its size has no effect, but must be a number.
            "sliding_window": _SIZE if window is None else window.size,
            **write_rope(config),
            **({} if local_field is None else {local_field: local}),
            "rope_parameters": {
                FULL: {**scaling, "rope_theta": config.rope_theta},
                SLIDING: {"rope_type": "default", "rope_theta": local},
            },
        }

    return Part(read, write, read_gguf)
