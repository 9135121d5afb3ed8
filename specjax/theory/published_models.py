"""Sizes of published models, for `roofline`, `memory` and the other functions of a `ModelShape`."""

from __future__ import annotations

from specjax.theory.chip_roofline import ExpertShape, ModelShape

_LLAMA_3 = {"num_kv_heads": 8, "vocab_size": 128256}

MODELS = {
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, tie_word_embeddings=True),
    "llama-3.2-1b": ModelShape(
        16, 2048, 8192, 32, head_dim=64, tie_word_embeddings=True, **_LLAMA_3
    ),
    "llama-3.2-3b": ModelShape(
        28, 3072, 8192, 24, head_dim=128, tie_word_embeddings=True, **_LLAMA_3
    ),
    "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, head_dim=128, **_LLAMA_3),
    "llama-3.1-70b": ModelShape(80, 8192, 28672, 64, head_dim=128, **_LLAMA_3),
    "llama-3.1-405b": ModelShape(126, 16384, 53248, 128, head_dim=128, **_LLAMA_3),
    "glm-4.7": ModelShape(
        92, 5120, 12288, 96, 8, 128, 151552, experts=ExpertShape(160, 8, 1536, 1536, 3)
    ),
}
"""Models by name, with the sizes of their published config.json; `.mtp()` is a module of one."""
