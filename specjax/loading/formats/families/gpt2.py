"""GPT-2 (Radford et al. 2019): layer norms, learned positions, a plain MLP, and biases."""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import schema
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
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
        "head_dim": schema.width_of_head(known),
        "mlp.activation": _ACTIVATIONS[name],
    }


def _write_rest(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {_ACTIVATION: names.get(config.mlp.activation, config.mlp.activation)}


def _read_gguf_rest(fields: GgufFields, known: Values) -> Values:
    return {
        "num_kv_heads": fields.integer("attention.head_count_kv", known["num_heads"]),
        "head_dim": fields.integer("attention.key_length", schema.width_of_head(known)),
        "mlp.activation": "gelu_tanh",
    }


def _four_widths(known: Values) -> int:
    return 4 * known["hidden_size"]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parts=(
        schema.integer("hidden_size", "n_embd", "embedding_length"),
        schema.integer("intermediate_size", "n_inner", "feed_forward_length", _four_widths),
        schema.integer("num_layers", "n_layer", "block_count"),
        schema.integer("num_heads", "n_head", "attention.head_count"),
        schema.integer("max_positions", "n_positions", "context_length", 1024),
        schema.number("rms_norm_eps", "layer_norm_epsilon", "attention.layer_norm_epsilon", 1e-5),
        schema.tied_head(True),
        Part(_read_rest, _write_rest, _read_gguf_rest),
        schema.fixed(
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
