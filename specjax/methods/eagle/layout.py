"""EAGLE heads in SafeAILab's layouts, and EAGLE-3 heads in the layout of the speculators library.

EAGLE-1 and 2: `fc`, whose input is concat(embedding, feature), and `layers.0` without an input norm
(model/cnets1.py of SafeAILab/EAGLE). EAGLE-3: `fc` over the taps, `midlayer`, `norm`, `lm_head` and
the maps `d2t` and `t2d` (model/cnets.py). Speculators (config version 0.9) has the same tensors,
with `layers.0` for `midlayer`, and the layer's fields in the section `transformer_layer_config`.
Rotary dimensions are in two halves, as in transformers and specjax.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import build_parameters, parameter_names, tensor_layout
from specjax.loading.formats.unread_fields import check_unread
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.heads import draft_vocabulary, eagle3_layer_ids, shared_with_target
from specjax.methods.heads.checkpoint import Checkpoint, match
from specjax.methods.heads.config_fields import (
    check_depth,
    decoder_fields,
    read_decoder,
    speculators_fields,
)
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.models.joined_kernels import parts

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of EAGLE-3 whose names all tools share; they default to false."""

_FC_BIAS = ("bias", "eagle_fc_bias")
_VLLM_FIELDS = {"method": "eagle", "skip_prenorm": True, "skip_output_norm": True}
"""Fields of EAGLE-1 in vLLM's EAGLEConfig, with the supported value."""

_LAYER, _EAGLE = "transformer_layer_config", "eagle_config"
_EAGLE3_FIELDS = (
    *_FLAGS,
    "draft_vocab_size",
    "target_hidden_size",
    _EAGLE,
    # These describe how training began, and have no effect on a stored head.
    *("reuse_target_lm_head", "target_model_type", "target_model_name_or_path"),
    *("ttt_length", "step_loss_decay", "draft_num_hidden_layers"),
    "num_target_layers",
    *eagle3_layer_ids.KEYS,
)
_SUPPORTED = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}
"""Fields of `eagle_config`, written by tools of vLLM and ModelOpt, with the supported values."""

_SPECULATORS_FIELDS = (
    "speculators_model_type",
    "speculators_config",
    "tie_word_embeddings",
    "mask_token_id",
    *eagle3_layer_ids.KEYS,
)
_SPECULATIVE_TOKENS = 4


def read_eagle1(
    checkpoint: Checkpoint, target: Model, metadata: TargetMetadata, training: dict[str, Any]
) -> Head:
    """Return an EAGLE-1 or 2 head; an embedding or head stored with it must equal the target's.

    `metadata` identifies the target, and `training` is stored with the head. Raises InputError for
    inconsistent flags, names or shapes.
    """
    fields = Fields(str(checkpoint.directory / "config.json"), checkpoint.config)
    for name, value in (*_VLLM_FIELDS.items(), ("truncated_vocab_size", fields.get("vocab_size"))):
        fields.only(name, value)
    decoder = read_decoder(fields, target, checkpoint.tensors, (*_FC_BIAS, "num_lookahead_tokens"))
    bias = "fc.bias" in checkpoint.tensors
    for name in _FC_BIAS:
        if fields.flag(name, bias) != bias:
            raise fields.fail(
                name, f"the file has {'' if bias else 'no '}fc.bias; repair config.json"
            )
    config = EagleConfig(
        decoder=decoder,
        version=1,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=target.config.vocab_size,
        taps=("final_norm",),
        fc_bias=bias,
    )
    stated, vocab_size = fields.count("vocab_size"), target.config.vocab_size
    extra = ("embed_tokens.weight", "lm_head.weight")
    tensors, _ = draft_vocabulary.drop_padding(checkpoint.tensors, None, extra, stated, vocab_size)
    own_arrays = (shared_with_target.target_embedding, shared_with_target.target_head)
    for name, own in zip(extra, own_arrays, strict=True):
        if name in tensors:
            shared_with_target.check_copy(
                checkpoint.directory, name, tensors[name], own(target), target, "EAGLE-1 uses"
            )
    params = _read_params(checkpoint.directory, tensors, config, "layers.0", extra)
    return Head("eagle", config, params, None, metadata, training)


def write_eagle1(head: Head) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and the tensors of an EAGLE-1 head, without the target's arrays.

    Raises InputError for a head with a draft vocabulary.
    """
    config = head.config
    assert isinstance(config, EagleConfig)
    if head.draft_ids is not None:
        raise InputError(
            f"format='eagle': the layout has no draft vocabulary, and this head has "
            f"{config.draft_vocab_size} of {config.decoder.vocab_size} tokens; export "
            "it with whole_vocabulary, so that it uses the target's whole head"
        )
    tensors = _named_tensors(head, "layers.0")
    fields = decoder_fields(config.decoder, tensors["fc.weight"].dtype)
    return {"architectures": ["LlamaForCausalLM"], **fields, "bias": config.fc_bias}, tensors


def read_eagle3(
    checkpoint: Checkpoint,
    target: Model,
    metadata: TargetMetadata,
    training: dict[str, Any],
    layer_ids: eagle3_layer_ids.Convention | None,
) -> Head:
    """Return an EAGLE-3 head from either layout; a stored embedding is kept if it differs.

    `metadata` identifies the target, and `training` is stored with the head. `layer_ids` is as in
    `read_foreign`. Raises InputError for inconsistent flags, names or shapes.
    """
    where = checkpoint.directory
    fields = Fields(str(where / "config.json"), checkpoint.config)
    speculators = "speculators_model_type" in fields.values
    layer_fields = fields.section(_LAYER) if speculators else fields
    inner = layer_fields if speculators else fields.section(_EAGLE)
    if speculators:
        _check_speculators(fields)
    else:
        for name in ("norm_before_fc", *eagle3_layer_ids.KEYS):
            inner.get(name)
        check_unread(inner, _SUPPORTED, "an EAGLE-3 head")
    extra = eagle3_layer_ids.KEYS if speculators else _EAGLE3_FIELDS
    decoder = read_decoder(layer_fields, target, checkpoint.tensors, extra)
    norms = {flag: fields.flag(flag) for flag in _FLAGS}
    stated = layer_fields.count("vocab_size")
    size = fields.count("draft_vocab_size", None if speculators else stated)
    target_hidden_size = fields.count("target_hidden_size", decoder.hidden_size)
    read_taps = eagle3_layer_ids.read([fields, inner], target, layer_ids)
    check_depth(fields, target, len(read_taps))
    if speculators:
        check_unread(fields, {}, "a head of speculators")
    else:
        # vLLM reads this flag here first.
        norms["norm_before_fc"] = inner.flag("norm_before_fc", norms["norm_before_fc"])
    if target_hidden_size != target.config.hidden_size:
        raise InputError(
            f"{where}: target_hidden_size={target_hidden_size}, and {target.name} has "
            f"{target.config.hidden_size}; use a head that was made for this target"
        )
    heads = ("lm_head.weight",)
    tensors, ids = draft_vocabulary.read(checkpoint, target, heads, size, stated)
    named = "embed_tokens.weight"
    borrows = decoder.hidden_size == target.config.hidden_size
    if named in tensors:
        borrows = not checkpoint.is_ours and _is_targets_embedding(tensors[named], target)
    config = EagleConfig(
        decoder=decoder,
        version=3,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=target.config.vocab_size if ids is None else len(ids),
        taps=read_taps,
        own_embedding=not borrows,
        **norms,
    )
    _check_norms(str(where), config)
    layer = "layers.0" if "layers.0.hidden_norm.weight" in tensors else "midlayer"
    params = _read_params(where, tensors, config, layer, ("d2t", "t2d", named))
    ids, order = draft_vocabulary.ascending(ids)
    params["head"]["kernel"] = params["head"]["kernel"][:, order]
    return Head("eagle3", config, params, ids, metadata, training)


def _check_speculators(fields: Fields) -> None:
    """Raise InputError for fields that this version of speculators lacks or reads differently."""
    fields.only("speculators_model_type", "eagle3")
    if fields.get("norm_before_residual") is None:
        raise fields.fail(
            "norm_before_residual",
            "must be true or false: speculators takes a missing one for false, vLLM for true",
        )
    for name in (*_SPECULATORS_FIELDS, _LAYER):
        fields.get(name)


def write_eagle3(
    head: Head, layer_ids: eagle3_layer_ids.Convention, *, speculators: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the config and tensors of an EAGLE-3 head, in SafeAILab's or speculators' layout.

    `head` has an output head of its own (`with_own_head`). Flags and taps without a name in
    SafeAILab's code get vLLM's names. Raises InputError for parts that neither layout has.
    """
    config, form = head.config, "speculators" if speculators else "eagle3"
    assert isinstance(config, EagleConfig)
    assert not config.shares_output
    if config.fc_bias:
        raise InputError(f"format={form!r}: the layout has no fc.bias, and this head has one")
    _check_norms(f"format={form!r}", config)
    tensors = _named_tensors(head, "layers.0" if speculators else "midlayer")
    layer = decoder_fields(config.decoder, tensors["fc.weight"].dtype)
    ids = eagle3_layer_ids.write(config.taps, head.target.num_layers, layer_ids)
    shared = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in _FLAGS},
    }
    if not speculators:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **shared,
            _EAGLE: {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        }, tensors
    if len(ids) != 3:
        # vLLM counts them here.
        layer["num_aux_hidden_states"] = len(ids)
    return {
        **speculators_fields("eagle3", "Eagle3Speculator", head.target.name, _SPECULATIVE_TOKENS),
        _LAYER: layer,
        **shared,
        "embed_requires_grad": config.own_embedding,
        "eagle_aux_hidden_state_layer_ids": ids,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
    }, tensors


def with_own_head(head: Head, target: Model) -> Head:
    """Return a head that stores the columns of the target's output head that it uses.

    Columns keep the target's dtype, so that the logits are the same. A head that has an output head
    of its own is returned unchanged.
    """
    config = head.config
    assert isinstance(config, EagleConfig)
    if not config.shares_output:
        return head
    rows = shared_with_target.target_head(target)
    rows = rows if head.draft_ids is None else rows[head.draft_ids]
    return replace(
        head,
        config=replace(config, own_head=True),
        params={**head.params, "head": {"kernel": rows.T}},
    )


def _check_norms(where: str, config: EagleConfig) -> None:
    if config.norm_before_fc and config.fc_norm:
        raise InputError(
            f"{where}: norm_before_fc and fc_norm are both true; tools apply them in different "
            "orders, or refuse both"
        )


_MODULES = {
    "fc": ("fc",),
    "{layer}.self_attn.q_proj": ("layer", "attention", "query"),
    "{layer}.self_attn.k_proj": ("layer", "attention", "key"),
    "{layer}.self_attn.v_proj": ("layer", "attention", "value"),
    "{layer}.self_attn.o_proj": ("layer", "attention", "output"),
    "{layer}.mlp.gate_proj": ("layer", "mlp", "gate"),
    "{layer}.mlp.up_proj": ("layer", "mlp", "up"),
    "{layer}.mlp.down_proj": ("layer", "mlp", "down"),
    "{layer}.post_attention_layernorm": ("layer", "mlp_norm"),
    "{layer}.input_layernorm": ("layer", "embedding_norm"),
    "{layer}.hidden_norm": ("layer", "hidden_norm"),
    "norm": ("final_norm",),
    "lm_head": ("head",),
    "input_norm": ("input_norm",),
    "embed_tokens": ("embed",),
}


def _locations(config: EagleConfig, layer: str) -> dict[str, parameter_names.Location]:
    """Return the place of each tensor in the head's tree, by the tensor's name.

    `layer` is the name of the head's layer, "midlayer" or "layers.0".
    """
    known = parts(config.parameter_table(), config.decoder)
    modules = {name.format(layer=layer): path for name, path in _MODULES.items()}
    modules |= {f"fc_norm.{tap}": ("fc_norm", str(tap)) for tap in range(len(config.taps))}
    location_of = {}
    for module, path in modules.items():
        for leaf in ("kernel", "scale", "embedding", "bias"):
            if (part := known.get((*path, leaf))) is not None:
                name = f"{module}.{'bias' if leaf == 'bias' else 'weight'}"
                entry = parameter_names.TensorEntry(name, (*path, leaf))
                (location_of[name],) = parameter_names.of_entry(entry, part, config.decoder)
    return location_of


def _named_tensors(head: Head, layer: str) -> dict[str, np.ndarray]:
    """Return a head's tensors, and those of its draft vocabulary, under SafeAILab's names."""
    config = head.config
    assert isinstance(config, EagleConfig)
    tensors = {
        name: tensor_layout.to_stored(
            np.asarray(parameter_names.lookup(head.params, location.path)), location
        )
        for name, location in _locations(config, layer).items()
    }
    if config.decoder.attention_bias:
        # In transformers the flag also adds a bias of the output, which these heads lack.
        kernel = tensors[f"{layer}.self_attn.o_proj.weight"]
        tensors[f"{layer}.self_attn.o_proj.bias"] = np.zeros(len(kernel), kernel.dtype)
    if head.draft_ids is not None:
        tensors |= draft_vocabulary.offsets(head.draft_ids, config.decoder.vocab_size)
    return tensors


def _is_targets_embedding(stored: np.ndarray, target: Model) -> bool:
    """Return whether an array, in the target's dtype, is the target's embedding."""
    own = shared_with_target.target_embedding(target)
    return tensor_layout.same_numbers(stored.astype(target.dtype), own)


def _read_params(
    where: Path,
    tensors: dict[str, np.ndarray],
    config: EagleConfig,
    layer: str,
    extra: tuple[str, ...],
) -> dict[str, Any]:
    """Return the parameter tree of the tensors; those named in `extra` are allowed and ignored."""
    table = _locations(config, layer)
    bias = f"{layer}.self_attn.o_proj.bias"
    if config.decoder.attention_bias:
        extra = (*extra, bias)
        if np.any(tensors.get(bias, 0)):
            raise InputError(f"{where}: {bias} is not zero, and heads with it are not supported")
    match(where, tensors, {name: location.stored_shape for name, location in table.items()}, extra)
    return build_parameters.stored_tree(table.values(), tensors)
