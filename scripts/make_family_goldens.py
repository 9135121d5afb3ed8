"""Write tests/goldens/families: tiny random models of each family, and what transformers computes.

Run it from the repository root, with a Python that has torch and transformers; with names, only
those families are written:

    python scripts/make_family_goldens.py [FAMILY ...]

Each folder is a checkpoint as `save_pretrained` writes it, and golden.npz: `tokens` [2, 40], the
`logits` after each of them [2, 40, V], and the 24 tokens that follow greedily, `greedy` [2, 24].
Windows are shorter than the text, soft caps small enough to matter, biases and norms random.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent.parent / "tests" / "goldens" / "families"
ROWS, TOKENS, GREEDY = 2, 40, 24
VOCAB = 96
MARGIN = 2e-3
"""The smallest difference of the two best logits that a greedy token may have been chosen by."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
GEMMA = SIZES | {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 7}
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": SIZES | {"rope_parameters": ROPE, "head_dim": 12, "sliding_window": 9},
    "qwen2": SIZES
    | {
        "rope_parameters": ROPE,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": SIZES | {"rope_parameters": ROPE, "head_dim": 12, "attention_bias": True},
    "gemma2": GEMMA
    | {
        "rope_parameters": ROPE,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": GEMMA
    | {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "rope_parameters": {
            FULL: LINEAR,
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "glm4": SIZES
    | {
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "head_dim": 12,
        "attention_bias": True,
    },
    "mixtral": SIZES
    | {
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "rope_parameters": ROPE,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": SIZES
    | {
        "num_hidden_layers": 2,
        "rope_parameters": ROPE,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "use_sliding_window": False,
    },
    "glm4_moe": SIZES
    | {
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}


def randomise(model: Any) -> None:
    """Weights of a spread with which each part matters."""
    offset = 0.0 if "gemma" in model.config.model_type else 1.0
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.3 * torch.randn_like(value))
        for name, value in model.named_parameters():
            noise = torch.randn_like(value)
            parts = name.split(".")
            if any(part.startswith("ln_") or "norm" in part for part in parts):
                neutral = offset if name.endswith("weight") else 0.0
                value.copy_(neutral + 0.3 * noise)
            elif name.endswith("bias"):
                value.copy_(0.3 * noise)
            elif "wpe" in parts:
                value.copy_(0.5 * noise)
            elif "embed_tokens" in parts or "wte" in parts:
                value.copy_(noise * value.shape[-1] ** -0.5)
            else:
                inputs = value.shape[0 if model.config.model_type == "gpt2" else -1]
                value.copy_(1.5 * noise * inputs**-0.5)


def write(name: str) -> None:
    """Save one model and its outputs; the first seed whose greedy choices are clear."""
    folder = FOLDER / name
    for seed in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **FAMILIES[name])
        model = AutoModelForCausalLM.from_config(config)
        randomise(model)
        model.to(torch.bfloat16).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokens = torch.randint(2, VOCAB, (ROWS, TOKENS))
        rows, margin = tokens, np.inf
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
            for _ in range(GREEDY):
                # Without a cache: whole rows each time.
                last = model(rows, use_cache=False).logits[:, -1]
                margin = min(margin, float(-torch.diff(last.topk(2).values).max()))
                rows = torch.cat([rows, last.argmax(-1, keepdim=True)], dim=1)
        greedy = rows[:, TOKENS:]
        if margin > MARGIN and len(set(greedy.flatten().tolist())) > GREEDY // 3:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear greedy tokens")
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "golden.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        greedy=greedy.numpy().astype(np.int32),
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, margin {margin:.4f}, {size} bytes")


def main() -> None:
    """Write the named families, or all."""
    for name in sys.argv[1:] or FAMILIES:
        write(name)


if __name__ == "__main__":
    main()
