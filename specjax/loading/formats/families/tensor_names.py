"""The names of a decoder's modules in Hugging Face's layout and in GGUF, one row per module.

They are the names of Llama, and of modules that other families add; a family with other names
overrides them (`table`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from specjax.loading.formats.parameter_names import TensorEntry


class _Module(NamedTuple):
    """The location of a module in the tree, its kind, and its name in each format.

    A vector is a single tensor, whose complete name is given. An empty name means that Llama has no
    such module in that format.
    """

    path: str
    kind: Literal["norm", "linear", "embedding", "vector"]
    huggingface: str
    gguf: str


_FINAL_NORM = _Module("final_norm", "norm", "model.norm", "output_norm")
_POSITIONS = _Module("positions", "embedding", "", "position_embd")
_LAYER_MODULES = (
    _Module("attention_norm", "norm", "input_layernorm", "attn_norm"),
    _Module("mlp_norm", "norm", "post_attention_layernorm", "ffn_norm"),
    _Module("after_attention_norm", "norm", "", "post_attention_norm"),
    _Module("after_mlp_norm", "norm", "", "post_ffw_norm"),
    _Module("attention.query_norm", "norm", "self_attn.q_norm", "attn_q_norm"),
    _Module("attention.key_norm", "norm", "self_attn.k_norm", "attn_k_norm"),
    _Module("attention.query_down", "linear", "self_attn.q_a_proj", ""),
    _Module("attention.query_latent_norm", "norm", "self_attn.q_a_layernorm", ""),
    _Module("attention.query_up", "linear", "self_attn.q_b_proj", ""),
    _Module("attention.kv_down", "linear", "self_attn.kv_a_proj_with_mqa", ""),
    _Module("attention.kv_latent_norm", "norm", "self_attn.kv_a_layernorm", ""),
    _Module("attention.kv_up", "linear", "self_attn.kv_b_proj", ""),
    _Module("attention.sinks", "vector", "self_attn.sinks", "attn_sinks.weight"),
    _Module("mlp.experts.down", "linear", "mlp.experts.{expert}.down_proj", "ffn_down_exps"),
    _Module("mlp.experts.gate", "linear", "mlp.experts.{expert}.gate_proj", "ffn_gate_exps"),
    _Module("mlp.experts.up", "linear", "mlp.experts.{expert}.up_proj", "ffn_up_exps"),
    _Module("mlp.router", "linear", "mlp.gate", "ffn_gate_inp"),
    _Module(
        "mlp.router.selection_bias",
        "vector",
        "mlp.gate.e_score_correction_bias",
        "exp_probs_b.bias",
    ),
    _Module("mlp.shared.down", "linear", "mlp.shared_experts.down_proj", "ffn_down_shexp"),
    _Module("mlp.shared.gate", "linear", "mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    _Module("mlp.shared.up", "linear", "mlp.shared_experts.up_proj", "ffn_up_shexp"),
    _Module(
        "mlp.shared_gate", "vector", "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"
    ),
    # The recurrent part of a layer, by the names of Qwen3-Next and 3.5.
    *(
        _Module(f"recurrence.{name}.{part}", "vector", f"linear_attn.{file}", f"ssm_{file}")
        for name, file in (("taps", "conv1d.weight"), ("taps_bias", "conv1d.bias"))
        for part in ("query", "key", "value")
    ),
    _Module("recurrence.log_rate", "vector", "linear_attn.A_log", "ssm_a"),
    _Module("recurrence.rate_bias", "vector", "linear_attn.dt_bias", "ssm_dt.bias"),
    _Module("recurrence.norm", "norm", "linear_attn.norm", "ssm_norm"),
    _Module("recurrence.query", "linear", "linear_attn.in_proj_qkv", "attn_qkv"),
    _Module("recurrence.key", "linear", "linear_attn.in_proj_qkv", "attn_qkv"),
    _Module("recurrence.value", "linear", "linear_attn.in_proj_qkv", "attn_qkv"),
    _Module("recurrence.gate", "linear", "linear_attn.in_proj_z", "attn_gate"),
    _Module("recurrence.share", "linear", "linear_attn.in_proj_b", "ssm_beta"),
    _Module("recurrence.decay", "linear", "linear_attn.in_proj_a", "ssm_alpha"),
    _Module("recurrence.output", "linear", "linear_attn.out_proj", "ssm_out"),
    _Module("recurrence.qkvz", "linear", "", ""),
    _Module("recurrence.rates", "linear", "", ""),
    _Module("recurrence.before", "linear", "", ""),
    _Module("recurrence.after", "linear", "", ""),
    _Module("recurrence.skip", "vector", "", "ssm_d"),
    _Module("attention.query", "linear", "self_attn.q_proj", "attn_q"),
    _Module("attention.key", "linear", "self_attn.k_proj", "attn_k"),
    _Module("attention.value", "linear", "self_attn.v_proj", "attn_v"),
    _Module("attention.output", "linear", "self_attn.o_proj", "attn_output"),
    _Module("mlp.gate", "linear", "mlp.gate_proj", "ffn_gate"),
    _Module("mlp.up", "linear", "mlp.up_proj", "ffn_up"),
    _Module("mlp.down", "linear", "mlp.down_proj", "ffn_down"),
)
"""The modules of a layer; their names here lack the prefix of the layer."""

_OUTER_NAMES = {
    "huggingface": {
        "layer": "model.layers.{layer}",
        "embed": "model.embed_tokens",
        "head": "lm_head",
    },
    "gguf": {"layer": "blk.{layer}", "embed": "token_embd", "head": "output"},
}
_PAIRED = ("attention.query", "attention.key")
_FLAT = ("recurrence.", "mlp.shared_gate")
"""The beginnings of the names of modules whose vectors have other axes in GGUF files."""


def table(
    format: Literal["huggingface", "gguf"],
    names: Mapping[str, str] = MappingProxyType({}),
    *,
    paired: bool = False,
    transposed: bool = False,
    norms_added: int = 0,
    fused: Collection[Sequence[str]] = (),
) -> tuple[TensorEntry, ...]:
    """Return the tensor entries of a format, with Llama's module names unless `names` has others.

    `paired` means that rotated dimensions of queries and keys are stored as adjacent pairs,
    `transposed` that kernels are stored [in, out], and `norms_added` is what the file's norm scales
    exceed the tree's by, except in recurrent layers. Each sequence in `fused` lists modules that
    are stored, in this order, in one tensor under one name. Experts whose name lacks `{expert}`
    share one tensor.
    """
    outer = {name: names.get(name, default) for name, default in _OUTER_NAMES[format].items()}
    entries = [
        TensorEntry(f"{outer['embed']}.weight", ("head", "kernel"), tied=True),
        TensorEntry(f"{outer['embed']}.weight", ("embed", "embedding"), tied=False),
        TensorEntry(f"{outer['head']}.weight", ("head", "kernel"), tied=False),
    ]
    groups = {
        path: tuple(part.rpartition(".")[2] for part in group) for group in fused for path in group
    }
    for module in (_FINAL_NORM, *_LAYER_MODULES, _POSITIONS):
        name = names.get(module.path, getattr(module, format))
        if not name:
            continue
        path = tuple(module.path.split("."))
        if module in _LAYER_MODULES:
            name, path = f"{outer['layer']}.{name}", ("layers", *path)
        is_paired = paired and module.path in _PAIRED
        group = groups.get(module.path, ())
        weight, bias = f"{name}.weight", TensorEntry(f"{name}.bias", (*path, "bias"))
        recurrent = module.path.startswith("recurrence.")
        flat = format == "gguf" and module.path.startswith(_FLAT)
        if module.kind == "norm":
            added = 0 if recurrent else norms_added
            entries += [TensorEntry(weight, (*path, "scale"), added=added, flat=flat), bias]
        elif module.kind == "linear":
            kernel = TensorEntry(weight, (*path, "kernel"), is_paired, fused=group)
            merged = "experts" in path and "{expert}" not in name
            entries.append(kernel._replace(transposed=transposed, merged=merged))
            entries.append(bias._replace(paired=is_paired, fused=group, merged=merged))
        elif module.kind == "embedding":
            entries.append(TensorEntry(weight, (*path, "embedding")))
        else:
            decay = format == "gguf" and module.path == "recurrence.log_rate"
            entries.append(TensorEntry(name, path, decay=decay, flat=flat, fused=group))
    return tuple(entries)
