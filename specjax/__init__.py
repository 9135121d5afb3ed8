"""specjax: speculative decoding in JAX, exact and measured.

Names are loaded when they are first used, so `import specjax.sampling` loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Drafter": "specjax.drafters.base",
    "Generation": "specjax.generation",
    "InputError": "specjax.errors",
    "Model": "specjax.models.model",
    "SamplingParams": "specjax.sampling_params",
    "from_vllm_speculative_config": "specjax.vllm_config",
    "generate": "specjax.generation",
    "load_model": "specjax.models.loading",
    "make_drafter": "specjax.drafters",
    "save_checkpoint": "specjax.checkpoints",
    "save_model": "specjax.models.loading",
    "stream": "specjax.generation",
}
_MODULES = ("checkpoints", "drafters", "metrics", "sampling", "testing", "theory", "trees")

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"specjax.{name}")
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
