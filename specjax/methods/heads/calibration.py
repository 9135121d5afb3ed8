"""Calibration of estimated probabilities by a temperature (Guo et al. 1706.04599)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

_BINS = 10
_RANGE = (0.05, 20.0)


def fit_temperature(logits: Float[np.ndarray, "N"], accepted: Float[np.ndarray, "N"]) -> float:
    """Return the T for which sigmoid(logit / T) has the least cross-entropy with `accepted`.

    It is 1 without values, and between 0.05 and 20. The cross-entropy is convex in 1 / T.
    """
    if not len(logits):
        return 1.0
    logits, accepted = logits.astype(np.float64), accepted.astype(np.float64)

    def slope(factor: float) -> float:
        """Return the derivative of the cross-entropy with respect to 1 / T."""
        return float(((_sigmoid(factor * logits) - accepted) * logits).mean())

    low, high = 1 / _RANGE[1], 1 / _RANGE[0]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return 2 / (low + high)


def calibration_error(logits: Float[np.ndarray, "N"], accepted: Float[np.ndarray, "N"]) -> float:
    """Return the expected calibration error of sigmoid(logits), over ten bins of equal width."""
    if not len(logits):
        return 0.0
    estimate = _sigmoid(logits.astype(np.float64))
    which = np.minimum((estimate * _BINS).astype(int), _BINS - 1)
    apart = np.bincount(which, weights=estimate - accepted, minlength=_BINS)
    return float(np.abs(apart).sum() / len(logits))


def _sigmoid(x: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    return 0.5 * (1 + np.tanh(0.5 * x))
