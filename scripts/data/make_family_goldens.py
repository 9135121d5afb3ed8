"""Write tests/goldens/families: tiny random models of each family, with transformers' outputs.

Models of the same families with other routers are in tests/goldens/variants beside them.

Run it from the repository root, with a Python that has torch and transformers; with names, only
those families are written:

    python scripts/data/make_family_goldens.py [FAMILY ...]

Each folder is a checkpoint as `save_pretrained` writes it, and golden.npz: `tokens` [2, 40], the
`logits` after each of them [2, 40, V], and the 24 tokens that follow greedily, `greedy` [2, 24].
Windows are shorter than the text, soft caps small enough to matter, biases and norms random.
Multimodal families read the text alone.
Families with modules for multi-token prediction have one: `mtp_logits` [2, 39, V] are its logits
for all pairs, computed with transformers' layers in the order of vLLM's `glm4_moe_mtp`,
`mimo_mtp` and `qwen3_next_mtp`, and `mtp_drafts` [2, 3] the tokens that it drafts after the last
pair from its own outputs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mxfp4Config,
)

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
ROWS, TOKENS, GREEDY = 2, 40, 24
VOCAB = 96
MARGIN = 2e-3
"""The minimum difference of the two best logits for a greedy token."""

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 3.5],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
GEMMA = SIZES | {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 7}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
}
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
        "num_nextn_predict_layers": 1,
    },
    "mimo": SIZES | {"rope_parameters": ROPE, "use_sliding_window": False},
    "smollm3": SIZES
    | {
        "num_hidden_layers": 4,
        "rope_parameters": ROPE,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [FULL, SLIDING, FULL, FULL],
        "tie_word_embeddings": True,
    },
    "olmo2": SIZES | {"rope_parameters": ROPE},
    "olmo3": SIZES
    | {
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "rope_parameters": {FULL: YARN, SLIDING: ROPE},
    },
    "phi3": SIZES
    | {
        "hidden_size": 48,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 32,
        "sliding_window": 11,
    },
    "granite": SIZES
    | {
        "rope_parameters": ROPE,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.7,
        "tie_word_embeddings": True,
    },
    "gpt_oss": SIZES
    | {
        "intermediate_size": 32,
        "head_dim": 16,
        "rope_parameters": YARN | {"truncate": False},
        "sliding_window": 7,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.5,
    },
    "deepseek_v2": LATENT
    | {
        "q_lora_rank": None,
        "rope_parameters": ROPE,
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
    },
    "deepseek_v3": LATENT
    | {
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "q_lora_rank": 20,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
}
LINEAR_LAYER = "linear_attention"
QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}
FAMILIES |= {
    "qwen3_5_text": SIZES
    | {
        "num_hidden_layers": 5,
        "head_dim": 12,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "layer_types": [LINEAR_LAYER, LINEAR_LAYER, FULL, LINEAR_LAYER, FULL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "qwen3_next": SIZES
    | QWEN_EXPERTS
    | {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "layer_types": [LINEAR_LAYER, LINEAR_LAYER, FULL],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "norm_topk_prob": True,
    },
    "olmo_hybrid": SIZES
    | {
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-4,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "layer_types": [LINEAR_LAYER, LINEAR_LAYER, FULL, LINEAR_LAYER],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "lfm2": {name: value for name, value in SIZES.items() if name != "rms_norm_eps"}
    | {
        "num_hidden_layers": 4,
        "rope_parameters": ROPE,
        "layer_types": ["conv", FULL, "conv", "conv"],
        "block_multiple_of": 8,
        "norm_eps": 1e-5,
    },
    "granitemoehybrid": FAMILIES["granite"]
    | MAMBA
    | {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR_LAYER, FULL, LINEAR_LAYER, LINEAR_LAYER],
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "nope",
        "mamba_conv_bias": False,
    },
    "bamba": SIZES
    | MAMBA
    | {
        "num_hidden_layers": 4,
        "attn_layer_indices": [2],
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "time_step_limit": [0.01, 2.0],
    },
    "nemotron_h": {
        name: value
        for name, value in SIZES.items()
        if name not in ("rms_norm_eps", "num_hidden_layers")
    }
    | {
        "layers_block_type": [LINEAR_LAYER, "mlp", FULL, "mlp", LINEAR_LAYER, LINEAR_LAYER],
        "head_dim": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 6,
        "n_groups": 2,
    },
}
FAMILIES |= {
    "qwen3_5": {
        "text_config": FAMILIES["qwen3_5_text"]
        | {
            "num_hidden_layers": 3,
            "layer_types": [LINEAR_LAYER, FULL, LINEAR_LAYER],
            "rope_parameters": ROPE
            | {
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        **{
            f"{kind}_token_id": VOCAB - 1 - index
            for index, kind in enumerate(("image", "video", "vision_start", "vision_end"))
        },
    },
    "gemma3": {
        "text_config": FAMILIES["gemma3_text"],
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": VOCAB - 1,
        "boi_token_index": VOCAB - 2,
        "eoi_token_index": VOCAB - 3,
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": FAMILIES["mistral"] | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": VOCAB - 1,
        "tie_word_embeddings": False,
    },
}
FAMILIES["qwen3_5_moe_text"] = {
    name: value for name, value in FAMILIES["qwen3_5_text"].items() if name != "intermediate_size"
} | {"num_hidden_layers": 3, "layer_types": [LINEAR_LAYER, FULL, LINEAR_LAYER], **QWEN_EXPERTS}
FAMILIES["qwen3_5_moe"] = FAMILIES["qwen3_5"] | {
    "text_config": FAMILIES["qwen3_5_moe_text"]
    | {"rope_parameters": FAMILIES["qwen3_5"]["text_config"]["rope_parameters"]}
}
RECURRENT = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
    *("olmo_hybrid", "lfm2", "granitemoehybrid", "bamba", "nemotron_h"),
)
QWEN_MODULES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
WITH_MODULES = ("glm4_moe", "mimo", "deepseek_v3", *QWEN_MODULES)
WRITTEN_AS = {"mimo": "qwen2"}
"""Families that transformers lacks, each with a family that has the same decoder."""
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "glm4_moe": {
        "num_hidden_layers": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v2": {"num_hidden_layers": 2, "topk_method": "greedy", "q_lora_rank": 20},
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "rope_interleave": False,
        "attention_bias": True,
        "rope_parameters": ROPE,
        "q_lora_rank": None,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {"num_hidden_layers": 2, "quantization_config": {"quant_method": "mxfp4"}},
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR_LAYER, FULL],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 12,
        "shared_intermediate_size": 20,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": [LINEAR_LAYER, FULL],
        "rope_parameters": ROPE,
        "linear_allow_neg_eigval": False,
    },
}
"""Changes of families' settings: router scores divided by their sum; a choice among all experts,
and an announced module whose tensors transformers does not write, as when it saves GLM-4.5; queries
with and without a latent, and rotated halves; experts in MXFP4; experts
beside a shared MLP; and rotated heads, with shares of at most 1.
"""
DRAFTS = 3
FIRST_SEED = {"qwen3_5_text": 6, "qwen3_5_moe_text": 2, "olmo_hybrid": 1}
"""Where an earlier seed gives states of nearly zero before a norm, which magnifies rounding."""


class Module(torch.nn.Module):
    """A family's module for multi-token prediction; `prefix` begins its names in a checkpoint."""

    def __init__(self, name: str, model: Any) -> None:
        super().__init__()
        text = text_part(model)
        config, width = text.config, text.config.hidden_size
        layers, norms = type(text.layers[-1]), type(text.norm)

        def norm() -> torch.nn.Module:
            return norms(width, eps=config.rms_norm_eps)

        # The index says whether the layer has experts, and that it has attention.
        kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
        self.layer = layers(config, max(i for i, kind in enumerate(kinds) if kind == FULL))
        self.embedding_norm, self.hidden_norm, self.final_norm = norm(), norm(), norm()
        self.projection = torch.nn.Linear(2 * width, width, bias=False)
        self.config, self.hidden_first = config, name == "mimo"
        self.keeps_first = name in QWEN_MODULES
        self.prefix, self.layer_prefix, self.names = "model.layers.3.", "", NAMES_OF_GLM
        if name == "mimo":
            self.prefix, self.names = "model.mtp_layers.0.", NAMES_OF_MIMO
        elif name in QWEN_MODULES:
            self.prefix, self.layer_prefix, self.names = "mtp.", "layers.0.", NAMES_OF_QWEN

    def forward(self, model: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normed outputs at positions 0, 1, ... for pairs of tokens and states."""
        text = text_part(model)
        embedded = text.embed_tokens(tokens)
        if not self.keeps_first:
            embedded[:, 0] = 0.0
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = self.projection(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))
        count = tokens.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=text.rotary_emb(x, positions),
        )
        return self.final_norm(out[0] if isinstance(out, tuple) else out)

    def stored(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the module's tensors by their names in a checkpoint.

        GLM's module repeats the embedding and the head. transformers holds all experts in one
        tensor, and checkpoints have one tensor per expert.
        """
        found = {}
        for name, value in self.state_dict().items():
            part, _, rest = name.partition(".")
            rest = self.layer_prefix + rest if part == "layer" else rest
            if rest.endswith("experts.gate_up_proj"):
                start = self.prefix + rest.removesuffix("gate_up_proj")
                for expert, both in enumerate(value):
                    for kind, kernel in zip(("gate", "up"), both.chunk(2), strict=True):
                        found[f"{start}{expert}.{kind}_proj.weight"] = kernel
            elif rest.endswith("experts.down_proj"):
                start = self.prefix + rest.removesuffix("down_proj")
                for expert, kernel in enumerate(value):
                    found[f"{start}{expert}.down_proj.weight"] = kernel
            elif part == "layer":
                found[self.prefix + rest] = value
            else:
                found[f"{self.prefix}{self.names[part]}.{rest}"] = value
        if self.names is NAMES_OF_GLM:
            found[self.prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
            found[self.prefix + "shared_head.head.weight"] = model.lm_head.weight.clone()
        return found


NAMES_OF_GLM = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
NAMES_OF_MIMO = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "final_norm": "final_layernorm",
}
NAMES_OF_QWEN = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "final_norm": "norm",
}


def text_part(model: Any) -> Any:
    """Return the decoder of a model for text, or for images and text."""
    return getattr(model.model, "language_model", model.model)


def modules_outputs(module: Module, model: Any, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the arrays to save of a module: its logits, and the drafts of its recursion."""
    hidden = text_part(model)(tokens, use_cache=False).last_hidden_state[:, :-1]
    read, drafts, logits = tokens[:, 1:], [], []
    for _ in range(DRAFTS):
        normed = module(model, read, hidden)
        logits.append(model.lm_head(normed))
        drafts.append(logits[-1][:, -1].argmax(-1, keepdim=True))
        read = torch.cat([read, drafts[-1]], dim=1)
        hidden = torch.cat([hidden, normed[:, -1:]], dim=1)
    return {
        "mtp_logits": logits[0].float().numpy(),
        "mtp_drafts": torch.cat(drafts, dim=1).numpy().astype(np.int32),
    }


def add_module(folder: Path, name: str, module: Module, model: Any) -> None:
    """Add a module to a saved checkpoint, under the family's names."""
    path = folder / "model.safetensors"
    tensors = {
        key: value.to(torch.bfloat16).contiguous() for key, value in module.stored(model).items()
    }
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        config["text_config"]["mtp_num_hidden_layers"] = 1
    elif name in QWEN_MODULES and name != "qwen3_next":  # which does not announce it
        config["mtp_num_hidden_layers"] = 1
    elif name not in QWEN_MODULES:
        config["num_nextn_predict_layers"] = 1
    if name in WRITTEN_AS:
        config |= {"model_type": name, "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def merge_experts(folder: Path) -> None:
    """Store the experts of a saved checkpoint in one tensor per layer, as it is published."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for start in {name.partition(".0.gate_proj")[0] for name in tensors if ".0.gate_proj" in name}:
        kernels: dict[str, list[torch.Tensor]] = {kind: [] for kind in ("gate", "up", "down")}
        while f"{start}.{len(kernels['up'])}.up_proj.weight" in tensors:
            expert = len(kernels["up"])
            for kind, of_kind in kernels.items():
                of_kind.append(tensors.pop(f"{start}.{expert}.{kind}_proj.weight"))
        gate, up, down = map(torch.stack, kernels.values())
        tensors |= {f"{start}.gate_up_proj": torch.cat([gate, up], 1), f"{start}.down_proj": down}
    save_file(tensors, path, {"format": "pt"})


def name_as_published(folder: Path, config: Any) -> None:
    """Store a saved OLMo hybrid as it is published.

    transformers saves its convolutions in equal pieces, whatever their widths, and gives norms of
    layers with attention the names of others.
    """
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for layer, kind in enumerate(config.layer_types):
        start = f"model.layers.{layer}"
        if kind == FULL:
            norm = tensors.pop(f"{start}.feedforward_layer_norm.weight")
            tensors[f"{start}.post_attention_layernorm.weight"] = norm
            continue
        names = [f"{start}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        pieces = whole.split([keys, keys, values])
        tensors |= {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}
    save_file(tensors, path, {"format": "pt"})


def store_mxfp4(folder: Path, quantization: dict[str, Any]) -> None:
    """Round the experts of a saved checkpoint to MXFP4, and store them as gpt-oss has them."""
    path, tensors = folder / "model.safetensors", {}
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    for name, value in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        rows = value.float().transpose(1, 2)
        groups = rows.reshape(*rows.shape[:2], -1, 32)
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        codes = (torch.ldexp(groups, -exponents)[..., None] - numbers).abs().argmin(-1)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def randomise(model: Any) -> None:
    """Give a model random weights with a spread at which every part matters."""
    family = model.config.model_type
    offset = 0.0 if any(name in family for name in ("gemma", "qwen3_5", "qwen3_next")) else 1.0
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(0.3 * torch.randn_like(value))
        for name, value in model.named_parameters():
            noise = torch.randn_like(value)
            parts = name.split(".")
            if any(part.startswith("ln_") or "norm" in part for part in parts):
                centred = 1.0 if "linear_attn" in parts else offset
                neutral = centred if name.endswith("weight") else 0.0
                value.copy_(neutral + 0.3 * noise)
            elif name.endswith("bias"):
                value.copy_(0.3 * noise)
            elif "wpe" in parts:
                value.copy_(0.5 * noise)
            elif "embed_tokens" in parts or "wte" in parts:
                value.copy_(noise * value.shape[-1] ** -0.5)
            else:
                is_transposed = value.ndim == 3 and model.config.model_type == "gpt_oss"
                is_transposed |= model.config.model_type == "gpt2"
                inputs = value.shape[-2 if is_transposed else -1]
                value.copy_(1.5 * noise * inputs**-0.5)


def write(name: str, folder: Path, settings: dict[str, Any], module: bool) -> None:
    """Save one model and its outputs, using the first seed whose greedy choices are clear."""
    settings = dict(settings)
    quantization = settings.pop("quantization_config", None)
    for seed in range(FIRST_SEED.get(folder.name, 0), 50):
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(seed)
        config = AutoConfig.for_model(WRITTEN_AS.get(name, name), **settings)
        of_images = hasattr(config, "vision_config")
        classes = AutoModelForImageTextToText if of_images else AutoModelForCausalLM
        model = classes.from_config(config)
        randomise(model)
        model.to(torch.bfloat16).save_pretrained(folder)
        if name == "qwen3_5_moe":
            merge_experts(folder)
        if name == "olmo_hybrid":
            name_as_published(folder, config)
        options = {}
        if quantization is not None:
            store_mxfp4(folder, quantization)
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        # In float32 transformers' chunked recurrences are wrong in the fourth digit.
        exact = torch.float64 if name in RECURRENT else torch.float32
        model = classes.from_pretrained(
            folder,
            dtype=exact,
            attn_implementation="eager",
            experts_implementation="eager",
            **options,
        ).eval()
        outputs = {}
        if module:
            drafting = Module(name, model)
            randomise(drafting)
            # Not the model, whose rotary frequencies would be rounded too.
            drafting = drafting.to(torch.bfloat16).to(exact).eval()
            add_module(folder, name, drafting, model)
        tokens = torch.randint(2, VOCAB, (ROWS, TOKENS))
        rows, margin = tokens, np.inf
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
            if module:
                outputs = modules_outputs(drafting, model, tokens)
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
        logits=logits.float().numpy(),
        greedy=greedy.numpy().astype(np.int32),
        **outputs,
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder.name}: seed {seed}, margin {margin:.4f}, {size} bytes")


def main() -> None:
    """Write the named families, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    for name in parser.parse_args().families or FAMILIES:
        settings = FAMILIES[name]
        write(name, GOLDENS / "families" / name, settings, name in WITH_MODULES)
        if name in VARIANTS:
            write(name, GOLDENS / "variants" / name, settings | VARIANTS[name], False)


if __name__ == "__main__":
    main()
