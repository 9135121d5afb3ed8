"""EAGLE heads in SafeAILab's layouts, of EAGLE-1 and 2 and of EAGLE-3.

EAGLE-1 and 2: `fc`, whose input is concat(embedding, feature), and `layers.0` without an input norm
(model/cnets1.py of SafeAILab/EAGLE). EAGLE-3: `fc` over the taps, `midlayer`, `norm`, `lm_head` and
the maps `d2t` and `t2d` (model/cnets.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.unread_fields import check_unread
from specjax.loading.head_formats import draft_vocabulary, taps
from specjax.loading.head_formats.checkpoint import Checkpoint
from specjax.loading.head_formats.config_fields import decoder_fields, read_decoder
from specjax.loading.head_formats.eagle_tensors import (
    is_targets,
    named_tensors,
    read_params,
    without_padding,
)
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig
from specjax.models.heads.eagle import EagleConfig

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of EAGLE-3 under the names that all tools use; missing ones are false."""

_FC_BIAS = ("bias", "eagle_fc_bias")
_VLLM_FIELDS = {"method": "eagle", "skip_prenorm": True, "skip_output_norm": True}
"""Fields of EAGLE-1 in vLLM's EAGLEConfig, with what is supported."""

_EAGLE3_FIELDS = (
    *FLAGS,
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    # Of a stored head of no effect: whose the numbers were when training began.
    "reuse_target_lm_head",
    "target_model_type",
    *taps.KEYS,
)
_EAGLE_CONFIG = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}
"""Fields of `eagle_config`, which tools of vLLM and ModelOpt write, with what is supported."""


class Flags(NamedTuple):
    """The fields of an EAGLE-3 head's config other than those of its layer."""

    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[str, ...]
    norms: dict[str, bool]


def read_eagle1(
    checkpoint: Checkpoint, target: Model, metadata: TargetMetadata, training: dict[str, Any]
) -> Head:
    """An EAGLE-1 or 2 head; an embedding or head stored beside it must equal the target's.

    Raises InputError for flags, names or shapes that do not fit.
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
    tensors = without_padding(checkpoint.tensors, fields.count("vocab_size"), target)
    for name, own in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        if name in tensors and not is_targets(name, tensors, target):
            raise InputError(
                f"{checkpoint.directory}: {name} differs from the {own} of {target.name}, which "
                "EAGLE-1 uses; use the weights that the head was trained for (those of a quantised "
                "file are others)"
            )
    extra = ("embed_tokens.weight", "lm_head.weight")
    params = read_params(checkpoint.directory, tensors, config, "layers.0", extra)
    return Head("eagle", config, params, None, metadata, training)


def write_eagle1(head: Head) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of an EAGLE-1 head; raises InputError for a draft vocabulary.

    The target's arrays that it uses are not written.
    """
    config = head.config
    assert isinstance(config, EagleConfig)
    if head.draft_ids is not None:
        raise InputError(
            f"format='eagle': the layout has no draft vocabulary, and this head has "
            f"{config.draft_vocab_size} of {config.decoder.vocab_size} tokens; export "
            "it with whole_vocabulary, so that it uses the target's whole head"
        )
    tensors = named_tensors(head, "layers.0")
    fields = decoder_fields(config.decoder, tensors["fc.weight"].dtype)
    return {"architectures": ["LlamaForCausalLM"], **fields, "bias": config.fc_bias}, tensors


def read_eagle3(
    checkpoint: Checkpoint,
    target: Model,
    metadata: TargetMetadata,
    training: dict[str, Any],
    layer_ids: taps.Convention | None,
) -> Head:
    """An EAGLE-3 head in SafeAILab's layout. Raises InputError for fields that do not fit."""
    fields = Fields(str(checkpoint.directory / "config.json"), checkpoint.config)
    decoder = read_decoder(fields, target, checkpoint.tensors, _EAGLE3_FIELDS)
    inner = fields.section("eagle_config")
    for name in ("norm_before_fc", *taps.KEYS):
        inner.get(name)
    check_unread(inner, _EAGLE_CONFIG, "an EAGLE-3 head")
    norms = {flag: fields.flag(flag) for flag in FLAGS}
    # vLLM reads this flag here first.
    norms["norm_before_fc"] = inner.flag("norm_before_fc", norms["norm_before_fc"])
    flags = Flags(
        fields.count("draft_vocab_size", fields.count("vocab_size")),
        fields.count("target_hidden_size", decoder.hidden_size),
        taps.read([fields, inner], target, layer_ids),
        norms,
    )
    layer = "layers.0" if "layers.0.hidden_norm.weight" in checkpoint.tensors else "midlayer"
    return build_eagle3(checkpoint, fields, target, decoder, flags, layer, metadata, training)


def write_eagle3(
    head: Head, layer_ids: taps.Convention
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of an EAGLE-3 head in SafeAILab's layout.

    Flags and taps without a name in the layout's own code are written under vLLM's names.
    """
    config = check_eagle3(head, "eagle3")
    tensors = named_tensors(head, "midlayer")
    ids = taps.write(config.taps, head.target.num_layers, layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **decoder_fields(config.decoder, tensors["fc.weight"].dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
    }, tensors


def build_eagle3(
    checkpoint: Checkpoint,
    fields: Fields,
    target: Model,
    decoder: DecoderConfig,
    flags: Flags,
    layer: str,
    metadata: TargetMetadata,
    training: dict[str, Any],
) -> Head:
    """The head of a checkpoint's tensors and flags; `fields` are those of its layer.

    A stored embedding becomes the head's own where it differs from the target's. Raises InputError
    for flags, names or shapes that do not fit.
    """
    where, vocab_size = checkpoint.directory, target.config.vocab_size
    if flags.target_hidden_size != target.config.hidden_size:
        raise InputError(
            f"{where}: target_hidden_size={flags.target_hidden_size}, and {target.name} has "
            f"{target.config.hidden_size}; use a head that was made for this target"
        )
    tensors = without_padding(checkpoint.tensors, fields.count("vocab_size"), target)
    size, stated = flags.draft_vocab_size, fields.count("vocab_size")
    size = vocab_size if size == stated else size
    mapped = len(tensors.get("d2t", ()))
    tensors = draft_vocabulary.drop_padding(tensors, stated, vocab_size)
    size -= mapped - len(tensors.get("d2t", ()))
    ids = draft_vocabulary.read_offsets(where, tensors, size, vocab_size)
    if ids is None and size != vocab_size:
        raise InputError(
            f"{where}: draft_vocab_size={size}, and the tensor d2t that maps them to the target's "
            f"{vocab_size} tokens is missing"
        )
    if ids is not None and np.array_equal(ids, np.arange(vocab_size)):
        ids = None
    named = "embed_tokens.weight"
    borrows = decoder.hidden_size == target.config.hidden_size
    if named in tensors:
        borrows = not checkpoint.is_ours and is_targets(named, tensors, target, exactly=True)
    config = EagleConfig(
        decoder=decoder,
        version=3,
        target_hidden_size=flags.target_hidden_size,
        draft_vocab_size=size,
        taps=flags.taps,
        own_embedding=not borrows,
        **flags.norms,
    )
    _check_norms(str(where), config)
    params = read_params(where, tensors, config, layer, ("d2t", "t2d", named))
    ids, order = draft_vocabulary.ascending(ids)
    params["head"]["kernel"] = params["head"]["kernel"][:, order]
    return Head("eagle3", config, params, ids, metadata, training)


def check_eagle3(head: Head, form: str) -> EagleConfig:
    """The head's config; raises InputError for parts that no layout of EAGLE-3 has."""
    config = head.config
    assert isinstance(config, EagleConfig)
    if config.fc_bias:
        raise InputError(f"format={form!r}: the layout has no fc.bias, and this head has one")
    _check_norms(f"format={form!r}", config)
    return config


def _check_norms(where: str, config: EagleConfig) -> None:
    if config.norm_before_fc and config.fc_norm:
        raise InputError(
            f"{where}: norm_before_fc and fc_norm are both true; tools apply them in different "
            "orders, or refuse both"
        )
