"""The shape of a decoder: what a checkpoint says about the network, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specjax.errors import InputError, shown

_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_layers": 1 << 16,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_positions": 1 << 30,
}
"""Far above every existing model: a larger size means a damaged file. Positions, and what is added
to them within a round, are int32."""

_SMALLEST_REAL, _LARGEST_REAL = 1e-15, 1e15
"""Quotients of two reals of a config must be numbers in float32 too."""


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for longer contexts.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides the slow ones by
    `factor`, keeps the fast ones and interpolates between wavelengths of original_max_positions /
    high_freq_factor and original_max_positions / low_freq_factor tokens. `factors` divides each
    frequency by its own entry, C/2 in all.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-family decoder: RMSNorm, grouped-query attention with RoPE, SiLU-gated MLP.

    Hashable, so that it can be a static argument of jit. `vocab_size` is V, `hidden_size` D,
    `intermediate_size` F, `num_layers` L, `num_heads` H, `num_kv_heads` G, `head_dim` C,
    `max_positions` the number of tokens of the longest context. Raises InputError for sizes that
    do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for field, largest in _LARGEST.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                raise InputError(
                    f"{field}={shown(value)}: must be a whole number of at least 1 and at most "
                    f"{largest}; repair the config"
                )
        for field in ("rms_norm_eps", "rope_theta"):
            _check_real(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads}: must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling, self.head_dim)


def _check_scaling(scaling: RopeScaling, head_dim: int) -> None:
    if scaling.kind not in ("linear", "llama3", "factors"):
        raise InputError(f"rope_scaling.kind={scaling.kind!r}: use linear, llama3 or factors")
    positive = {"factor": scaling.factor}
    if scaling.kind == "llama3":
        positive["low_freq_factor"] = scaling.low_freq_factor
        positive["original_max_positions"] = scaling.original_max_positions
        positive["high_freq_factor"] = scaling.high_freq_factor
        if not scaling.low_freq_factor < scaling.high_freq_factor:
            raise InputError(
                f"rope_scaling.high_freq_factor={scaling.high_freq_factor}: must exceed "
                f"low_freq_factor={scaling.low_freq_factor}"
            )
    if scaling.kind == "factors":
        if len(scaling.factors) != head_dim // 2:
            raise InputError(
                f"rope_scaling.factors: {len(scaling.factors)} entries, must be one for each of "
                f"the head_dim/2={head_dim // 2} frequencies"
            )
        positive |= {f"factors[{i}]": value for i, value in enumerate(scaling.factors)}
    for field, value in positive.items():
        _check_real(f"rope_scaling.{field}", value)


def _check_real(field: str, value: float) -> None:
    if not _SMALLEST_REAL <= value <= _LARGEST_REAL:
        raise InputError(
            f"{field}={shown(value)}: must be a positive number, from {_SMALLEST_REAL:g} to "
            f"{_LARGEST_REAL:g}; repair the config"
        )
