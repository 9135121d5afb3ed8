"""Checks of config.json fields that no reader used, and which must not change the model.

A field is accepted if its name has no effect (`_INERT`), if its value agrees with the model that
was read (`implied`), or if it is empty: null, false, 0, "", [] or {}. Any other field would change
the model, and is rejected by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from specjax.errors import shown
from specjax.loading.formats.families.schema import layer_types
from specjax.loading.typed_fields import Fields, is_empty
from specjax.models.config import DecoderConfig, Experts

Implied = Mapping[str, Collection[Any]]
"""The values of fields, by name, that agree with a model and thus have no effect."""

_QUANTISED = ("quantization_config", "quantization", "compression_config")

_INERT = re.compile(
    "|".join(
        (
            # transformers' own notes, tools' marks, and where a model came from
            r"_\w+|architectures|auto_map|model_type|is_llama_config|\w+_version|version",
            r"transformers\.js_config|transformers_weights|unsloth_\w+|tags|license|language",
            r"library_name|pipeline_tag|datasets?",
            r"(base_)?model_name(_or_path)?|name_or_path|base_model|name|author|description",
            # numbers of weights as stored, and how they are computed
            r"(torch_)?dtype|fp16|bf16|fp32|use_bfloat16|torchscript|reorder_and_upcast_attn",
            r"(use_)?flash_?att\w*|attn_implementation|use_(cache|sdpa|xformers)",
            r"use_memory_efficient_attention|pretraining_tp|tensor_parallel\w*|ep_size|device_map",
            r"cache_implementation",
            # training
            r"\w*dropout\w*|\w+_pdrop|layerdrop|\w*initializer\w*|init_\w+",
            r"\w*_loss(_\w+)?|router_jitter\w*|gradient_checkpointing\w*|\w+_requires_grad",
            r"has_no_defaults_at_init|pruned_heads|neftune\w*|seq_aux|\w+_update_(rate|speed)",
            # tokens and texts, which the tokenizer's files state
            r"\w+_token_(id|ids|index)|\w+_token|tokenizer_\w+|prefix|add_(bos|eos)_\w+",
            r"(model_)?max_(sequence_|seq_)?len(gth)?|max_seq\w*|seq_?len\w*|sequence_length|n_ctx",
            r"(max_)?context_len(gth)?",
            r"chat_format|chat_template|max_window_size",
            # heads for other tasks, and outputs beside the logits
            r"id2label|label2id|_?num_labels|problem_type|finetuning_task|task_specific_params",
            r"classifier_\w+|summary_\w+|predict_special_tokens|tie_encoder_decoder",
            r"output_(attentions|hidden_states|past|scores|router_logits)|(use_)?return_dict",
            r"return_dict_in_generate|num_logits_to_keep|is_(encoder_)?decoder|cross_attention_hidden_size",
            r"chunk_size_feed_forward",
            # generation
            r"do_sample|temperature|top_k|top_p|typical_p|num_beams|num_beam_groups|early_stopping",
            r"\w*_penalty|(min|max)_(new_tokens|length)|bad_words_ids|\w*suppress_tokens",
            r"\w*no_repeat_ngram_size|num_return_sequences|remove_invalid_values",
            # windows, where no layer has one; otherwise the family's reader asks for it
            r"max_window_layers",
        )
    )
)
"""Matches the names of fields that never affect the logits."""

_CONSTANT: Implied = {
    "logit_scale": (1,),
    "causal": (True,),
    "is_causal": (True,),
    "scale_attn_weights": (True,),
}
"""Values that are the same in all supported models."""

_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu": ("gelu",),
    "relu2": ("relu2",),
    "gelu_sigmoid": ("quick_gelu",),
}


def implied(config: DecoderConfig) -> Implied:
    """Return the values that fields of config.json must have to agree with a decoder, by name."""
    attention, window = config.attention, config.sliding_window
    rotary = config.rotary_width
    epsilon, act = config.rms_norm_eps, _ACTIVATIONS[config.mlp.activation]
    values = {
        ("hidden_size", "n_embd", "d_model"): config.hidden_size,
        ("intermediate_size", "n_inner", "ffn_hidden_size"): config.intermediate_size,
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers"): config.num_layers,
        ("num_attention_heads", "num_heads", "n_head", "n_heads"): config.num_heads,
        ("num_key_value_heads", "num_kv_heads", "n_kv_heads"): config.num_kv_heads,
        ("head_dim", "kv_channels", "attention_head_dim"): config.head_dim,
        ("original_max_position_embeddings",): config.max_positions,
        ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layernorm_epsilon"): epsilon,
        ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias"): config.attention_bias,
        ("mlp_bias",): config.mlp_bias,
        ("use_qk_norm", "qk_norm", "qk_layernorm"): attention.qk_norm,
        ("attn_logit_softcapping",): attention.softcap,
        ("final_logit_softcapping",): config.logit_softcap,
        ("sliding_window", "sliding_window_size"): window and window.size,
        ("sliding_window_pattern", "_sliding_window_pattern"): window and len(window.pattern),
        ("use_sliding_window",): window is not None,
        ("layer_types",): layer_types(config),
        ("partial_rotary_factor", "rotary_pct"): rotary / config.head_dim,
        ("rotary_dim",): rotary,
        ("rotary_emb_base", "rotary_base"): config.rope_theta,
        ("use_rope", "use_rotary"): rotary > 0,
        ("embedding_multiplier",): config.embedding.scale,
        ("residual_multiplier",): config.residual_scale,
        ("logits_scaling",): config.logit_divisor,
    }
    if config.experts is not None:
        values |= _of_experts(config.experts)
    accepted = {name: (value,) for names, value in values.items() for name in names}
    positions = ("rope", "rotary", "rotary_embedding") if rotary else ("absolute", "learned")
    accepted |= dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), act)
    return {**_CONSTANT, **accepted, "position_embedding_type": positions}


def _of_experts(experts: Experts) -> dict[tuple[str, ...], Any]:
    method = "noaux_tc" if experts.selection_bias else "greedy"
    shared = experts.shared_size // experts.intermediate_size
    return {
        ("num_experts", "num_local_experts", "n_routed_experts"): experts.num_experts,
        (
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "moe_topk",
        ): experts.per_token,
        ("moe_intermediate_size",): experts.intermediate_size,
        ("norm_topk_prob",): experts.normalize,
        ("routed_scaling_factor",): experts.scale,
        ("scoring_func", "score_func", "scoring_function"): experts.router,
        ("topk_method",): method,
        ("n_group", "num_expert_group"): experts.groups,
        ("topk_group",): experts.groups_per_token,
        ("n_shared_experts", "num_shared_experts"): shared,
        ("shared_expert_intermediate_size",): experts.shared_size,
        ("first_k_dense_replace",): experts.num_dense,
        ("decoder_sparse_step", "moe_layer_freq"): 1,
        ("mlp_only_layers",): list(range(experts.num_dense)),
    }


def is_inert(name: str) -> bool:
    """Return whether a field of this name never affects the logits."""
    return _INERT.fullmatch(name) is not None


def check_unread(fields: Fields, allowed: Implied, what: str) -> None:
    """Raise InputError for a field that was not read and would change the model.

    `allowed` are values by name, as returned by `implied`; `what` names in messages what was read.
    """
    values = fields.values
    for name in _QUANTISED:
        if name not in fields.asked and not is_empty(values.get(name)):
            raise fields.fail(
                name,
                "quantised weights in this layout are not supported; use the model in bfloat16 or "
                "float32, or a GGUF of it",
            )
    unread = [name for name in sorted(values) if name not in fields.asked]
    if values.get("use_sliding_window") is False:
        unread = [name for name in unread if name != "sliding_window"]
    unknown = []
    for name in unread:
        value = values[name]
        if name in allowed and value is not None:
            accepted = allowed[name]
            if value not in accepted and not (is_empty(value) and all(map(is_empty, accepted))):
                has = " or ".join(shown(one) for one in accepted)
                raise fields.fail(name, f"is not supported; {what} has only {has}")
        elif not is_empty(value) and not is_inert(name):
            unknown.append(name)
    if unknown:
        raise fields.unknown(
            unknown,
            "use a model without it, or take it out of config.json if it does not change what is "
            "computed",
        )
