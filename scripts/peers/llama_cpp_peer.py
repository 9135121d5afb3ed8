"""Serves llama.cpp: one JSON request per line on stdin, one JSON answer per line on stdout.

    python scripts/peers/llama_cpp_peer.py MODEL.gguf

As `transformers_peer.py`, with llama-cpp-python in an environment of its own. Weights are those of
the file; llama.cpp rounds activations to 8 bits.
"""

from __future__ import annotations

import json
import os
import sys
import time


def serve(gguf: str) -> None:
    """Answer requests until the input ends."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = len(os.sched_getaffinity(0))
    models: dict[int, Llama] = {}
    print(json.dumps({"threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        lookup = request["lookup"]
        if lookup not in models:
            draft = LlamaPromptLookupDecoding(3, lookup) if lookup else None
            models[lookup] = Llama(
                gguf,
                n_ctx=2048,
                n_threads=threads,
                n_threads_batch=threads,
                draft_model=draft,
                logits_all=bool(lookup),
                verbose=False,
            )
        model, new = models[lookup], []
        model.reset()
        begin = time.perf_counter()
        for token in model.generate(request["ids"], temp=0.0, repeat_penalty=1.0):
            if not new:
                first = time.perf_counter()
            new.append(token)
            if len(new) == request["max_new_tokens"] or token == model.token_eos():
                break
        end = time.perf_counter()
        answer = {"ids": new, "prefill_s": first - begin, "total_s": end - begin}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
