"""EAGLE-3 heads in the layout of the speculators library (config of its version 0.9).

Tensors are SafeAILab's, with `layers.0` for `midlayer`; config.json keeps the layer's fields apart
under `transformer_layer_config`, and says how to draft under `speculators_config`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.unread_fields import check_unread
from specjax.loading.head_formats import eagle, taps
from specjax.loading.head_formats.checkpoint import Checkpoint
from specjax.loading.head_formats.config_fields import decoder_fields, read_decoder
from specjax.loading.head_formats.eagle_tensors import named_tensors
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields

_SPECULATIVE_TOKENS = 4
_IDLE = ("speculators_model_type", "tie_word_embeddings", "mask_token_id")


def read(
    checkpoint: Checkpoint,
    target: Model,
    metadata: TargetMetadata,
    training: dict[str, Any],
    layer_ids: taps.Convention | None,
) -> Head:
    """The EAGLE-3 head of a checkpoint. Raises InputError for fields that do not fit."""
    fields = Fields(str(checkpoint.directory / "config.json"), checkpoint.config)
    if fields.values.get("speculators_model_type") != "eagle3":
        raise fields.fail("speculators_model_type", "is not supported; only 'eagle3' is")
    if type(fields.values.get("norm_before_residual")) is not bool:
        raise fields.fail(
            "norm_before_residual",
            "must be true or false: speculators takes a missing one for false, vLLM for true",
        )
    inner = fields.section("transformer_layer_config")
    decoder = read_decoder(inner, target, checkpoint.tensors, taps.KEYS[1:])
    for name in ("norm_before_residual", "speculators_config", *taps.KEYS, *_IDLE):
        fields.get(name)
    flags = eagle.Flags(
        fields.count("draft_vocab_size"),
        fields.count("target_hidden_size", decoder.hidden_size),
        taps.read([fields, inner], target, layer_ids),
        {flag: fields.flag(flag) for flag in eagle.FLAGS},
    )
    check_unread(fields, {}, "a head of speculators")
    return eagle.build_eagle3(
        checkpoint, inner, target, decoder, flags, "layers.0", metadata, training
    )


def write(
    head: Head, layer_ids: taps.Convention, speculative_tokens: int = _SPECULATIVE_TOKENS
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the tensors of an EAGLE-3 head, in the layout that `read` reads."""
    if head.kind != "eagle3":
        raise InputError(f"format='speculators': the layout has no {head.kind} heads")
    config = eagle.check_eagle3(head, "speculators")
    tensors = named_tensors(head, "layers.0")
    layer = decoder_fields(config.decoder, tensors["fc.weight"].dtype)
    if len(config.taps) != 3:
        # vLLM counts them here.
        layer["num_aux_hidden_states"] = len(config.taps)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": head.target.name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in eagle.FLAGS},
        "embed_requires_grad": config.own_embedding,
        "eagle_aux_hidden_state_layer_ids": taps.write(
            config.taps, head.target.num_layers, layer_ids
        ),
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
    }, tensors
