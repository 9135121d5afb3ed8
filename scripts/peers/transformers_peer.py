"""Serves transformers: one JSON request per line on stdin, one JSON answer per line on stdout.

    python scripts/peers/transformers_peer.py MODEL.gguf [cuda]

Runs in an environment of its own, with torch and transformers and nothing of specjax; started by
`compare_peers.py`. On a CPU it computes in float32, on another device in bfloat16. A request is
{"ids", "max_new_tokens", "lookup"}, an answer {"ids", "prefill_s", "total_s"}: the new token ids,
the time to the first token, and of the whole call.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def serve(gguf: str, device: str = "cpu") -> None:
    """Answer requests until the input ends."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = Path(gguf)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = (
        AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        .eval()
        .to(device)
    )
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor([request["ids"]], device=device)
        options = {"max_new_tokens": request["max_new_tokens"], "do_sample": False}
        if request["lookup"]:
            options |= {"prompt_lookup_num_tokens": request["lookup"], "max_matching_ngram_size": 3}
        with torch.inference_mode():
            # One new token takes the prefill; the rest of the time is decoding.
            begin = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
            )
            first = time.perf_counter()
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            end = time.perf_counter()
        new = out[0, ids.shape[1] :].tolist()
        answer = {"ids": new, "prefill_s": first - begin, "total_s": end - first}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
