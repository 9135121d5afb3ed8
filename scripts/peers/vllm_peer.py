"""Decode token ids with vLLM, greedily, and write ids and acceptance; run by `check_vllm.py`.

Reads one JSON request from stdin: {"model", "prompts": [[ids]], "max_new_tokens",
"speculative_config": {...} or null}. Writes {"token_ids", "drafts", "accepted_per_pos", "version"}
to the file that is the one argument, since vLLM prints to stdout as it likes. Runs in float32 in an
environment of its own, with vLLM and nothing of specjax.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def norm_keys_by_layer() -> None:
    """Norm the keys of a DFlash drafter's features with the scale of their own layer.

    On a CPU, vLLM 0.32 norms those of all layers with the first layer's scale.
    """
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(model: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
        squares = keys.float().pow(2).mean(-1, keepdim=True)
        scaled = keys.float() * torch.rsqrt(squares + model._rms_norm_eps)
        scaled = scaled * model._k_norm_weights[:, None, None, :].float()
        return scaled.to(keys.dtype).contiguous()

    DFlashQwen3Model._normalize_context_k = normed


def main() -> None:
    """Answer the request."""
    request = json.load(sys.stdin)
    import vllm

    norm_keys_by_layer()
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"] + 16
    engine = vllm.LLM(
        model=request["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=request["speculative_config"],
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=request["max_new_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    outputs = engine.generate(prompts, params, use_tqdm=False)
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
        "version": vllm.__version__,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
