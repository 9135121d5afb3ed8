"""Rotary frequencies, with the context-length scalings of the Llama family."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from specjax.models.config import DecoderConfig, RopeScaling


def frequencies(config: DecoderConfig) -> Float[np.ndarray, "half"]:
    """Radians per position of each rotated pair, [C/2], float32.

    Entry i turns the pair (i, i + C/2) of a head (RoFormer, arXiv:2104.09864, in the half-split
    order of the Llama checkpoints on Hugging Face).
    """
    # float32 from the start, in the order in which the models were trained: at position 8000 a
    # frequency that differs in its last bit turns the angle by up to 5e-4.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain = np.float32(1.0) / np.float32(config.rope_theta) ** exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.kind == "factors":
        return plain / np.asarray(scaling.factors, np.float32)
    return _llama3(plain, scaling)


def _llama3(plain: Float[np.ndarray, "half"], scaling: RopeScaling) -> Float[np.ndarray, "half"]:
    """Slow frequencies divided by the factor, fast ones kept, those between interpolated."""
    turns = np.float32(scaling.original_max_positions) / (np.float32(2 * np.pi) / plain)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / np.float32(span), 0.0, 1.0)
    return ((1.0 - keep) * plain / np.float32(scaling.factor) + keep * plain).astype(np.float32)
