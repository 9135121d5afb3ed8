"""GPT-2 (Radford et al. 2019): layer norms, learned positions, a plain MLP, biases everywhere."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats import gguf_keys
from specjax.loading.formats.families import common
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.loading.formats.json_fields import Fields
from specjax.models.config import Attention, DecoderConfig, Embedding, Mlp, Norm

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_FUSED = (("query", "key", "value"),)


def _structure(activation: str) -> dict[str, Any]:
    return {
        "norm": Norm("layer"),
        "attention": Attention(rotary_width=0),
        "attention_bias": True,
        "mlp": Mlp(activation, gated=False),
        "mlp_bias": True,
        "embedding": Embedding(positions=True),
    }


def _read(fields: Fields) -> dict[str, Any]:
    activation = fields.get("activation_function") or "gelu_new"
    if activation not in _ACTIVATIONS:
        raise fields.fail("activation_function", f"is not supported; use {', '.join(_ACTIVATIONS)}")
    width, heads = fields.integer("n_embd"), fields.integer("n_head")
    return {
        "hidden_size": width,
        "intermediate_size": fields.integer("n_inner", 4 * width),
        "num_layers": fields.integer("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width // max(heads, 1),
        "max_positions": fields.integer("n_positions", 1024),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        **_structure(_ACTIVATIONS[activation]),
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.rms_norm_eps,
        "activation_function": names.get(config.mlp.activation, config.mlp.activation),
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _read_gguf(keys: GgufKeys) -> dict[str, Any]:
    return {**gguf_keys.read_sizes(keys, norm="layer"), **_structure("gelu_tanh")}


_NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{layer}.ln_1",
    "mlp_norm": "transformer.h.{layer}.ln_2",
    "query": "transformer.h.{layer}.attn.c_attn",
    "key": "transformer.h.{layer}.attn.c_attn",
    "value": "transformer.h.{layer}.attn.c_attn",
    "output": "transformer.h.{layer}.attn.c_proj",
    "up": "transformer.h.{layer}.mlp.c_fc",
    "down": "transformer.h.{layer}.mlp.c_proj",
}
_QKV = dict.fromkeys(_FUSED[0], "blk.{layer}.attn_qkv")
_GGUF_NAMES = {name: text for name, text in common.GGUF_NAMES.items() if name != "gate"}

FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    # Its Conv1D modules store kernels [in, out].
    tensors=common.table(_NAMES, transposed=True, fused=_FUSED),
    # Causal masks that old checkpoints kept.
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    gguf=GgufLayout(
        "gpt2",
        _read_gguf,
        common.table(_GGUF_NAMES | _QKV | {"positions": "position_embd"}, fused=_FUSED),
    ),
)
