"""Gemma 3's text models (2503.19786): Gemma 2 with QK-norms, and two rotary bases.

Five layers of six have a sliding window, with a rotary base of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common, gemma2
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.huggingface_rope import read_rope, write_rope
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, RopeScaling, SlidingWindow

_GLOBAL, _LOCAL = 1_000_000.0, 10_000.0
"""The rotary bases where a config does not state them."""
_PERIOD = 6
_SIZE_OF_27B = 62


def _read_ropes(fields: Fields, max_positions: int) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of layers that see everything, and the base of those with a window."""
    where, nested = Path(fields.where), fields.get("rope_parameters")
    scaling, theta = fields.get("rope_scaling"), fields.number("rope_theta", _GLOBAL)
    local = fields.number("rope_local_base_freq", _LOCAL)
    older = {"rope_theta": theta, "rope_scaling": scaling}
    if nested is None:
        return *read_rope(where, older, max_positions), local
    ropes = fields.section("rope_parameters")
    ropes.check_known(("full_attention", "sliding_attention"))
    inner = {
        kind: {"rope_theta": default, **ropes.section(kind).values}
        for kind, default in (("full_attention", theta), ("sliding_attention", local))
    }
    whole = {**older, "rope_parameters": inner["full_attention"]}
    full = read_rope(where, whole, max_positions)
    local, scaled = read_rope(where, {"rope_parameters": inner["sliding_attention"]}, max_positions)
    if scaled is not None:
        raise ropes.fail("sliding_attention", "is not supported; only the default rope_type is")
    return *full, local


def _read(fields: Fields) -> dict[str, Any]:
    read = gemma2.read_shared(fields, 131072)
    num_layers = read["num_layers"]
    size, period = fields.integer("sliding_window", 4096), _PERIOD
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):
        period = fields.whole(name, period)
    windowed = [(layer + 1) % period != 0 for layer in common.layers(num_layers)]
    window = common.read_window(fields, size, num_layers, windowed)
    theta, scaling, local = _read_ropes(fields, read["max_positions"])
    return {
        **read,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention": Attention(qk_norm=True, query_scale=gemma2.query_scale(fields)),
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
        "sliding_window": None if window is None else replace(window, rope_theta=local),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    window, scaling = config.sliding_window, write_rope(config)
    local = _LOCAL if window is None or window.rope_theta is None else window.rope_theta
    written = {
        **gemma2.write_shared(config),
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": local,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
    if window is None:
        # Where no layer has a window, its size says nothing, but must be a number.
        written["sliding_window"] = 4096
    return written


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    sizes = gguf_keys.read_sizes(keys)
    # llama.cpp reads a file without the key as one without windows.
    size = keys.whole("attention.sliding_window", 0)
    period = keys.whole("attention.sliding_window_pattern", _PERIOD)
    if size and not period:
        keys.only("attention.sliding_window_pattern", _PERIOD)
    windowed = [(layer + 1) % max(period, 1) != 0 for layer in common.layers(sizes["num_layers"])]
    window = None
    if size and any(windowed):
        local = keys.real("rope.freq_base_swa", _LOCAL)
        window = SlidingWindow(size, common.shortest_period(windowed), local)
    return {
        **sizes,
        **gguf_keys.read_rope(keys, sizes["head_dim"], _GLOBAL),
        **gemma2.shared(sizes["hidden_size"]),
        "attention": Attention(
            qk_norm=True, query_scale=gemma2.gguf_query_scale(sizes, _SIZE_OF_27B)
        ),
        "logit_softcap": keys.optional_real("final_logit_softcapping"),
        "sliding_window": window,
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    tensors=common.table(common.NAMES | gemma2.NAMES | common.QK_NORM_NAMES),
    gguf=GgufLayout(
        "gemma3",
        _read_gguf,
        common.table(
            common.GGUF_NAMES | gemma2.GGUF_NAMES | common.GGUF_QK_NORM_NAMES, norms_added=1
        ),
    ),
)
