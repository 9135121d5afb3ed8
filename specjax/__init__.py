"""specjax: speculative decoding in JAX, exact and measured.

    model = specjax.load_model("smollm2-135m-instruct")      a name, a directory or a GGUF file
    drafter = specjax.make_drafter("eagle3", model)          or "ngram", which needs no weights
    result = specjax.generate(model, "Once upon a time", drafter=drafter, max_new_tokens=64)
    print(result.texts[0], result.summary())

    specjax.stream      text after every step         specjax.sampling   rules, on arrays
    specjax.Engine      requests at any time          specjax.metrics    figures from counts
    specjax.compile     compile before the first call specjax.theory     what speculation can gain
    specjax.Drafter     write your own drafter        specjax.trees      token trees
    specjax.testing     tests of exactness            specjax.drafters   drafters and their options

See `help(specjax.generate)`, `help(specjax.sampling)` and docs/tutorial.md. Names are imported on
first use, so `import specjax.sampling` imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DecodeOptions": "specjax.engine.options",
    "Delta": "specjax.engine.outputs",
    "Drafter": "specjax.core.drafter",
    "Engine": "specjax.engine.engine",
    "Generation": "specjax.engine.generate",
    "LoadedDrafter": "specjax.core.drafter",
    "InputError": "specjax.errors",
    "Model": "specjax.loading.model",
    "Output": "specjax.engine.outputs",
    "SamplingParams": "specjax.engine.requests",
    "compile": "specjax.engine.generate",
    "from_vllm_speculative_config": "specjax.methods.vllm_config",
    "generate": "specjax.engine.generate",
    "load_model": "specjax.loading.load",
    "make_drafter": "specjax.drafters",
    "save_checkpoint": "specjax.loading.checkpoints",
    "save_model": "specjax.loading.load",
    "stream": "specjax.engine.generate",
}
_MODULES = {
    "checkpoints": "specjax.loading.checkpoints",
    "controllers": "specjax.controllers",
    "processors": "specjax.processors",
    "diagnosis": "specjax.diagnosis",
    "drafters": "specjax.drafters",
    "metrics": "specjax.metrics",
    "sampling": "specjax.sampling",
    "sharding": "specjax.distributed.sharding",
    "testing": "specjax.testing",
    "theory": "specjax.theory",
    "trees": "specjax.trees",
    "tuning": "specjax.tuning",
}

__all__ = sorted([*_HOMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
