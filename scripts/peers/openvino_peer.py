"""Serves OpenVINO: one JSON request per line on stdin, one JSON answer per line on stdout.

    python scripts/peers/openvino_peer.py MODEL.gguf

As `transformers_peer.py`, with openvino-genai in an environment of its own. Weights are those of
the file; precision and rounding of activations are OpenVINO's defaults for the processor.
"""

from __future__ import annotations

import json
import os
import sys
import time


def serve(gguf: str) -> None:
    """Answer until the input ends."""
    import numpy as np
    import openvino
    import openvino_genai

    threads = len(os.sched_getaffinity(0))
    pipelines: dict[bool, openvino_genai.LLMPipeline] = {}
    print(json.dumps({"threads": threads}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        lookup = request["lookup"]
        if bool(lookup) not in pipelines:
            options = {"prompt_lookup": True} if lookup else {}
            pipelines[bool(lookup)] = openvino_genai.LLMPipeline(
                gguf, "CPU", INFERENCE_NUM_THREADS=threads, **options
            )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = request["max_new_tokens"], False
        config.apply_chat_template = False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = lookup, 3
        ids = np.array([request["ids"]], np.int64)
        tensors = openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        begin = time.perf_counter()
        result = pipelines[bool(lookup)].generate(openvino_genai.TokenizedInputs(*tensors), config)
        end = time.perf_counter()
        first = result.perf_metrics.get_ttft().mean / 1e3
        answer = {"ids": result.tokens[0], "prefill_s": first, "total_s": end - begin}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
