"""Hybrids of Mamba-2 and attention: Granite 4 and Bamba (IBM 2025), Nemotron-H (2504.03624).

Granite has the multipliers of Granite 3, attention without rotation, and some have experts, or
attention with rotation alone; Bamba rotates half of each head. A layer of Nemotron-H is Mamba-2,
attention or an MLP alone.
"""

from __future__ import annotations

from typing import Any

from specjax.loading.formats.families import recurrent, schema
from specjax.loading.formats.families.granite import MULTIPLIERS, mlp_width
from specjax.loading.formats.families.schema import FULL, Part, Values
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.family import Family, GgufLayout
from specjax.loading.formats.gguf_fields import GgufFields
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig

_LEGACY = {"attention": "attention", "mamba": "recurrent"}


def _all_recurrent(fields: Fields, num_layers: int) -> list[bool]:
    return [True] * len(schema.layers(num_layers))


def _read_positions(fields: Fields, known: Values) -> Values:
    """Return the rotated width, which is 0 unless the file asks for rotation."""
    fields.only("position_embedding_type", "rope", "nope")
    if fields.get("position_embedding_type") != "rope":
        return {"attention.rotary_width": 0}
    return {}


def _write_positions(config: DecoderConfig) -> dict[str, Any]:
    return {"position_embedding_type": "rope" if config.rotary_width else "nope"}


def _read_experts(fields: Fields, known: Values) -> Values:
    """Return the experts, beside which the MLP is shared; a model without them states 0."""
    fields.asked |= {"intermediate_size", "num_experts_per_tok"}
    if not (count := fields.integer("num_local_experts", 8)):
        return {}
    return {
        "experts.num_experts": count,
        "experts.per_token": fields.integer("num_experts_per_tok", 2),
        "experts.intermediate_size": fields.count("intermediate_size", 11008),
        "experts.shared_size": known["intermediate_size"],
    }


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    if (experts := config.experts) is None:
        return {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "intermediate_size": experts.intermediate_size,
    }


_MLPS = {
    "mlp": "shared_mlp",
    "mlp.shared": "shared_mlp",
    "mlp.experts": "block_sparse_moe",
}
"""The modules of MLPs; with experts the MLP is the shared one."""


def _with_kv_heads(sizes: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return `schema.sizes` without that of the MLP, with key/value heads stated by layer."""
    heads = schema.integer("num_kv_heads", "num_key_value_heads", recurrent.kv_heads, schema.heads)
    return (*sizes[:1], *sizes[2:4], heads, *sizes[5:])


def _read_gguf_experts(fields: GgufFields, known: Values) -> Values:
    fields.asked |= {"expert_count", "feed_forward_length"}
    if not (count := fields.integer("expert_count", 0)):
        return {}
    return {
        "experts.num_experts": count,
        "experts.per_token": fields.integer("expert_used_count"),
        "experts.intermediate_size": fields.integer("feed_forward_length"),
        "experts.shared_size": known["intermediate_size"],
    }


def _read_gguf_positions(fields: GgufFields, known: Values) -> Values:
    return {"attention.rotary_width": 0}


GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    parts=(
        schema.integer("intermediate_size", "shared_intermediate_size", mlp_width, 1024),
        *_with_kv_heads(schema.sizes()),
        schema.rope(),
        Part(_read_positions, _write_positions, _read_gguf_positions),
        schema.ATTENTION_BIAS,
        *MULTIPLIERS,
        recurrent.layer_types(
            recurrent.LINEAR, _all_recurrent, _LEGACY, read_gguf=recurrent.by_kv_heads
        ),
        *recurrent.mamba2(),
        Part(_read_experts, _write_experts, _read_gguf_experts),
        schema.SILU,
        schema.constant("normalization_function", "rmsnorm"),
    ),
    tensors=table(
        "huggingface",
        {
            **recurrent.MAMBA_NAMES,
            **{f"{mlp}.gate": f"{name}.input_linear" for mlp, name in _MLPS.items()},
            **{f"{mlp}.up": f"{name}.input_linear" for mlp, name in _MLPS.items()},
            **{f"{mlp}.down": f"{name}.output_linear" for mlp, name in _MLPS.items()},
            "mlp.router": "block_sparse_moe.router.layer",
        },
        fused=(*((f"{mlp}.gate", f"{mlp}.up") for mlp in _MLPS), *recurrent.MAMBA_FUSED),
    ),
    # Files of Bamba have True, and rotate.
    gguf=GgufLayout(
        "granitehybrid",
        table("gguf", recurrent.MAMBA_GGUF, fused=recurrent.MAMBA_FUSED),
        fixed={"rope.scaling.finetuned": False},
    ),
)


def _check_rotated(fields: Fields, known: Values) -> Values:
    fields.only("attn_rotary_emb", known["attention.rotary_width"])
    return {}


def _read_attention_layers(fields: Fields, known: Values) -> Values:
    layers = fields.integers("attn_layer_indices") or []
    mixers = [
        "attention" if layer in layers else "recurrent"
        for layer in schema.layers(known["num_layers"])
    ]
    return {"mixers": schema.shortest_period(mixers)}


def _write_attention_layers(config: DecoderConfig) -> dict[str, Any]:
    return {"attn_layer_indices": [*config.layers_with("attention")]}


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    parts=(
        *schema.sizes(max_positions=262144, epsilon=1e-5),
        schema.rope(partial=0.5),
        Part(_check_rotated),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        Part(_read_attention_layers, _write_attention_layers),
        *recurrent.mamba2(),
        schema.SILU,
    ),
    tensors=table(
        "huggingface",
        {
            **recurrent.MAMBA_NAMES,
            "final_norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "mlp.gate": "feed_forward.gate_proj",
            "mlp.up": "feed_forward.up_proj",
            "mlp.down": "feed_forward.down_proj",
        },
        fused=recurrent.MAMBA_FUSED,
    ),
)

_BLOCKS = {recurrent.LINEAR: "recurrent", FULL: "attention", "mlp": "absent"}
_LETTERS = {"M": recurrent.LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_OLDER_BLOCKS = {"mamba": recurrent.LINEAR, "attention": FULL}


def _read_blocks(fields: Fields, known: Values) -> Values:
    """Return the mixers of the layers, and which of them are MLPs instead."""
    name, pattern = "layers_block_type", fields.get("hybrid_override_pattern")
    blocks = fields.get(name)
    if blocks is None and isinstance(pattern, str):
        name, blocks = "hybrid_override_pattern", [_LETTERS.get(one, one) for one in pattern]
    if not isinstance(blocks, list) or not blocks or {*map(type, blocks)} != {str}:
        raise fields.fail(name, "must name the kind of each layer")
    blocks = [_OLDER_BLOCKS.get(one, one) for one in blocks]
    if unknown := sorted({str(one) for one in blocks} - _BLOCKS.keys()):
        raise fields.fail(
            name, f"{unknown[0]} is not supported; the decoder supports {' and '.join(_BLOCKS)}"
        )
    fields.only("num_hidden_layers", len(blocks))
    return {
        "num_layers": len(blocks),
        "mixers": schema.shortest_period([_BLOCKS[one] for one in blocks]),
        "mlps": schema.shortest_period([one == "mlp" for one in blocks]),
    }


def _write_blocks(config: DecoderConfig) -> dict[str, Any]:
    names = {mixer: name for name, mixer in _BLOCKS.items()}
    kinds = {layer: names[run.mixer] for run in config.runs for layer in run.layers}
    return {
        "layers_block_type": [kinds[layer] for layer in range(config.num_layers)],
        "num_hidden_layers": config.num_layers,
    }


_NOT_READ = (
    *(
        "expand",
        "chunk_size",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_rank",
    ),
    *("num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32"),
    *("rescale_prenorm_residual", "n_routed_experts", "n_shared_experts", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "num_experts_per_tok"),
    *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "moe_latent_size"),
    *("mtp_layers_block_type", "rope_theta", "rope_parameters", "partial_rotary_factor"),
    *("attention_head_dim", "mamba_num_groups"),
)
"""Fields that say how the model is trained and divided, or belong to layers that it has not."""


def _read_gguf_blocks(fields: GgufFields, known: Values) -> Values:
    """Return the mixers, given the numbers of key/value heads and the widths of MLPs by layer."""
    count = fields.count("block_count")
    layers = len(schema.layers(count))
    heads = fields.by_layer("attention.head_count_kv", layers)
    widths = fields.by_layer("feed_forward_length", layers)
    mixers = [
        "attention" if heads[layer] else "absent" if widths[layer] else "recurrent"
        for layer in range(layers)
    ]
    return {
        "num_layers": count,
        "mixers": schema.shortest_period(mixers),
        "mlps": schema.shortest_period([width > 0 for width in widths]),
    }


def _widest(fields: GgufFields) -> int:
    return fields.largest("feed_forward_length")


def _check_gguf(fields: GgufFields, known: Values) -> Values:
    """Raise InputError for another epsilon; nothing is rotated, whatever the file says of that."""
    fields.only("attention.layer_norm_epsilon", known["rms_norm_eps"])
    fields.asked |= {"rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned"}
    return {}


_KEY_LENGTH, _EPSILON = "attention.key_length", "attention.layer_norm_rms_epsilon"

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    parts=(
        Part(_read_blocks, _write_blocks, _read_gguf_blocks),
        schema.integer("hidden_size", "hidden_size", "embedding_length"),
        schema.integer("intermediate_size", "intermediate_size", _widest),
        schema.integer("num_heads", "num_attention_heads", "attention.head_count"),
        schema.integer("num_kv_heads", "num_key_value_heads", recurrent.kv_heads, 8),
        schema.integer("head_dim", ("head_dim", "attention_head_dim"), _KEY_LENGTH, 128),
        schema.integer("max_positions", "max_position_embeddings", "context_length", 4096),
        schema.number("rms_norm_eps", "layer_norm_epsilon", _EPSILON, 1e-5),
        Part(read_gguf=_check_gguf),
        schema.tied_head(False),
        schema.fixed({"attention.rotary_width": 0, "recurrence.kind": "mamba2"}),
        schema.fixed({"mlp.activation": "relu2", "mlp.gated": False}),
        schema.ATTENTION_BIAS,
        schema.MLP_BIAS,
        schema.constant("mlp_hidden_act", "relu2"),
        schema.constant("mamba_hidden_act", "silu"),
        schema.integer("recurrence.conv_width", "conv_kernel", "ssm.conv_kernel", 4),
        schema.integer("recurrence.key_heads", "n_groups", "ssm.group_count", 8),
        schema.integer("recurrence.value_heads", "mamba_num_heads", "ssm.time_step_rank", 128),
        schema.integer(
            "recurrence.value_width", "mamba_head_dim", recurrent.value_width_of_gguf, 64
        ),
        schema.integer("recurrence.key_width", "ssm_state_size", "ssm.state_size", 128),
        schema.flag("recurrence.conv_bias", "use_conv_bias", recurrent.has_conv_bias, True),
        schema.flag("recurrence.bias", "mamba_proj_bias", default=False),
        recurrent.step_limits("time_step_limit"),
        schema.constant("use_bias", False),
        schema.unread(*_NOT_READ),
    ),
    tensors=table(
        "huggingface",
        {
            **{
                path: name.replace("mamba.", "mixer.")
                for path, name in recurrent.MAMBA_NAMES.items()
            },
            "final_norm": "model.norm_f",
            "embed": "model.embeddings",
            "attention_norm": "norm",
            "mlp_norm": "norm",
            "attention.query": "mixer.q_proj",
            "attention.key": "mixer.k_proj",
            "attention.value": "mixer.v_proj",
            "attention.output": "mixer.o_proj",
            "mlp.up": "mixer.up_proj",
            "mlp.down": "mixer.down_proj",
        },
        fused=recurrent.MAMBA_FUSED,
    ),
    gguf=GgufLayout(
        "nemotron_h",
        table(
            "gguf",
            {"mlp_norm": "attn_norm", **recurrent.MAMBA_GGUF},
            fused=recurrent.MAMBA_FUSED,
        ),
    ),
)
