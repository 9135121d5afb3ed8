"""Arrays on the host that a CPU device adopts without copying them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes; XLA's CPU client copies a host array that starts anywhere else


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros, whose memory the system provides where it is first written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)
