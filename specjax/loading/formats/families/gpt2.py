"""GPT-2 (Radford et al. 2019): layer norms, learned positions, a plain MLP, biases everywhere."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families.common import tied_head, width_of_head
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import (
    Family,
    GgufLayout,
    Part,
    Values,
    fixed,
    integer,
    number,
    row,
)
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_ACTIVATION = "activation_function"
_FUSED = (("attention.query", "attention.key", "attention.value"),)


def _read_rest(fields: Fields, known: Values) -> Values:
    name = fields.get(_ACTIVATION) or "gelu_new"
    fields.only(_ACTIVATION, *_ACTIVATIONS)
    return {
        "num_kv_heads": known["num_heads"],
        "head_dim": width_of_head(known),
        "mlp.activation": _ACTIVATIONS[name],
    }


def _write_rest(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {_ACTIVATION: names.get(config.mlp.activation, config.mlp.activation)}


def _read_gguf_rest(fields: Fields, known: Values) -> Values:
    return {
        "num_kv_heads": fields.integer("attention.head_count_kv", known["num_heads"]),
        "head_dim": fields.integer("attention.key_length", width_of_head(known)),
        "mlp.activation": "gelu_tanh",
    }


def _four_widths(known: Values) -> int:
    return 4 * known["hidden_size"]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parts=(
        row("hidden_size", integer("n_embd"), integer("embedding_length")),
        row("intermediate_size", integer("n_inner", _four_widths), integer("feed_forward_length")),
        row("num_layers", integer("n_layer"), integer("block_count")),
        row("num_heads", integer("n_head"), integer("attention.head_count")),
        row("max_positions", integer("n_positions", 1024), integer("context_length")),
        row(
            "rms_norm_eps",
            number("layer_norm_epsilon", 1e-5),
            number("attention.layer_norm_epsilon"),
        ),
        tied_head(True),
        Part(_read_rest, _write_rest, _read_gguf_rest),
        fixed(
            {
                "norm.kind": "layer",
                "attention.rotary_width": 0,
                "attention_bias": True,
                "mlp.gated": False,
                "mlp_bias": True,
                "embedding.positions": True,
            }
        ),
    ),
    # Its Conv1D modules store kernels [in, out].
    tensors=table(
        "huggingface",
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "final_norm": "transformer.ln_f",
            "layer": "transformer.h.{layer}",
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            "attention.query": "attn.c_attn",
            "attention.key": "attn.c_attn",
            "attention.value": "attn.c_attn",
            "attention.output": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        transposed=True,
        fused=_FUSED,
    ),
    # Causal masks that old checkpoints kept.
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    gguf=GgufLayout("gpt2", table("gguf", dict.fromkeys(_FUSED[0], "attn_qkv"), fused=_FUSED)),
)
