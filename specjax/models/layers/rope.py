"""Rotary frequencies, with their scalings for longer contexts."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from specjax.models.config import DecoderConfig, RopeScaling


def frequencies(config: DecoderConfig, windowed: bool = False) -> Float[np.ndarray, "half"]:
    """Return the rotary frequencies in radians per position, float32 [R/2].

    R is the number of rotated dimensions. Entry i rotates the pair (i, i + R/2) of a head
    (RoFormer, arXiv:2104.09864, in the half-split order of the Llama checkpoints on Hugging Face).
    `windowed` selects the layers with a sliding window, which may have another base.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if windowed and config.sliding_window is not None:
        window_theta = config.sliding_window.rope_theta
        theta, scaling = (theta, scaling) if window_theta is None else (window_theta, None)
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
        return unscaled / np.asarray(scaling.factors, np.float32)
    return _llama3(unscaled, scaling)


def _llama3(unscaled: Float[np.ndarray, "half"], scaling: RopeScaling) -> Float[np.ndarray, "half"]:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate those between."""
    turns = np.float32(scaling.original_max_positions) / (np.float32(2 * np.pi) / unscaled)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / np.float32(span), 0.0, 1.0)
    return ((1.0 - keep) * unscaled / np.float32(scaling.factor) + keep * unscaled).astype(
        np.float32
    )
