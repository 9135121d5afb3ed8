"""Rotary frequencies, with their scalings for longer contexts."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from specjax.models.config import DecoderConfig, RopeScaling


def frequencies(config: DecoderConfig, windowed: bool = False) -> Float[np.ndarray, "half"]:
    """Return the rotary frequencies in radians per position, float32 [R/2].

    R is the number of rotated dimensions. Entry i rotates the pair (i, i + R/2) of a head
    (RoFormer, arXiv:2104.09864, in the half-split order of the Llama checkpoints on Hugging Face).
    `windowed` selects the layers with a sliding window, which may have another base.
    """
    theta, scaling = _base_and_scaling(config, windowed)
    # float32 from the start, in the order in which the models were trained: at position 8000 a
    # frequency that differs in its last bit turns the angle by up to 5e-4.
    width = config.rotary_width
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    unscaled = np.float32(1.0) / np.float32(theta) ** exponents
    if scaling is None:
        return unscaled
    if scaling.kind == "linear":
        return unscaled / np.float32(scaling.factor)
    if scaling.kind == "factors":
        short = scaling.short_factors and config.max_positions <= scaling.original_max_positions
        factors = scaling.short_factors if short else scaling.factors
        return unscaled / np.asarray(factors, np.float32)
    if scaling.kind == "yarn":
        return _yarn(unscaled, scaling, theta)
    return _llama3(unscaled, scaling)


def attention_factor(config: DecoderConfig, windowed: bool = False) -> float:
    """Return the factor of rotated dimensions of queries and keys; `windowed` as in `frequencies`.

    Scores of these dimensions are multiplied by its square.
    """
    _, scaling = _base_and_scaling(config, windowed)
    return 1.0 if scaling is None else scaling.attention_factor


def _base_and_scaling(config: DecoderConfig, windowed: bool) -> tuple[float, RopeScaling | None]:
    window = config.sliding_window
    if windowed and window is not None and window.rope_theta is not None:
        return window.rope_theta, None
    return config.rope_theta, config.rope_scaling


def _yarn(
    unscaled: Float[np.ndarray, "half"], scaling: RopeScaling, theta: float
) -> Float[np.ndarray, "half"]:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate those between."""
    width = 2 * len(unscaled)

    def index_of(turns: float) -> float:
        tokens_per_radian = scaling.original_max_positions / (turns * 2 * math.pi)
        return width * math.log(tokens_per_radian) / (2 * math.log(theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 * (first == last)
    index = np.arange(len(unscaled), dtype=np.float32)
    slow = np.clip((index - np.float32(first)) / np.float32(last - first), 0.0, 1.0)
    return slow * unscaled / np.float32(scaling.factor) + (1.0 - slow) * unscaled


def _llama3(unscaled: Float[np.ndarray, "half"], scaling: RopeScaling) -> Float[np.ndarray, "half"]:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate those between."""
    turns = np.float32(scaling.original_max_positions) / (np.float32(2 * np.pi) / unscaled)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / np.float32(span), 0.0, 1.0)
    return ((1.0 - keep) * unscaled / np.float32(scaling.factor) + keep * unscaled).astype(
        np.float32
    )
