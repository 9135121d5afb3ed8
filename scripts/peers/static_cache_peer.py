r"""Serves transformers with a static cache: JSON lines on stdin, JSON lines on stdout.

    python scripts/peers/static_cache_peer.py \
        '{"device": "cuda", "dtype": "bfloat16", "shape": {...}}'

Runs in an environment with torch and transformers and nothing of specjax; started by
`bench_accelerator.py`. The first answer names the versions; a request is {"batch", "context",
"new_tokens", "runs"}, an answer {"round_s": [seconds per token after the first, per run]}. Where
something is missing or fails the answer is {"error": why}.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(asked: dict[str, Any]) -> None:
    """Answer until the input ends."""
    try:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError as error:
        answer(error=str(error))
        return
    device = torch.device(asked["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        answer(error=f"torch {torch.__version__} sees no GPU")
        return
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, asked["dtype"])
    shape = LlamaConfig(**asked["shape"])
    try:
        with device:
            model = AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    except torch.OutOfMemoryError as error:
        answer(error=f"out of memory: {error}")
        return
    # No token ends a row.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    answer(torch=torch.__version__, transformers=transformers.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            # The first run compiles.
            runs = [decode(torch, model, request) for _ in range(request["runs"] + 1)]
            answer(round_s=runs[1:])
        except torch.OutOfMemoryError as error:
            answer(error=f"out of memory: {error}")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def decode(torch: Any, model: Any, request: dict[str, int]) -> float:
    """Seconds per token, between the first new token and the last."""
    steps: list[float] = []

    def tick(ids: Any, scores: Any, **_: Any) -> Any:
        if len(steps) in (0, request["new_tokens"] - 1) and ids.is_cuda:
            torch.cuda.synchronize()
        steps.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    shape = (request["batch"], request["context"])
    ids = torch.randint(0, model.config.vocab_size, shape, device=model.device)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
            cache_implementation="static",
            stopping_criteria=[tick],
        )
    return (steps[-1] - steps[0]) / (len(steps) - 1)


def answer(**fields: Any) -> None:
    """One line of output."""
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
