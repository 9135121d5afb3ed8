"""Decode token ids with vLLM, greedily, and write ids and acceptance; for `check_vllm.py`.

Reads one JSON request from stdin: {"model", "prompts": [[ids]], "max_new_tokens", "dtype",
"speculative_config": {...} or null}. Writes {"token_ids", "drafts", "accepted_per_pos", "seconds",
"version"} to the file that is the one argument: vLLM prints to stdout as it likes. Runs in a
virtual environment of its own, that `check_vllm.sh` builds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    import vllm

    longest = max(map(len, request["prompts"])) + request["max_new_tokens"] + 16
    engine = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=longest,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=request["speculative_config"],
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=request["max_new_tokens"])
    begin = time.perf_counter()
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in request["prompts"]], params, use_tqdm=False
    )
    seconds = time.perf_counter() - begin
    drafts, accepted = 0, []
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = list(metric.values)
    answer = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts,
        "accepted_per_pos": accepted,
        "seconds": seconds,
        "version": vllm.__version__,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
