"""The config.json of a head: the fields of its single Llama layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.loading.user_messages import note
from specjax.models.config import DecoderConfig

_LAYERS = re.compile(r"layers\.(\d+)\.")


def read_decoder(
    fields: Fields, target: Model, names: Iterable[str], extra: Collection[str] = ()
) -> DecoderConfig:
    """Return the config of the single Llama layer that config.json describes.

    It has the target's vocabulary. `names` are the names of the tensors. They determine the number
    of layers, whatever config.json states, and whether queries, keys and values have biases if it
    does not say. The caller reads the fields `extra`. A vocabulary padded beyond the target's is
    truncated. Raises InputError for another kind of layer and for fields that would change it.
    """
    names = list(names)
    # EAGLE's code for Qwen2 copies the target's type; its layer is Llama's with biases.
    if fields.get("model_type") not in (None, "llama", "qwen2"):
        raise fields.fail("model_type", "use a head whose layer is Llama's")
    layers = max((int(match[1]) for match in map(_LAYERS.match, names) if match), default=0) + 1
    if layers > 1:
        raise InputError(
            f"{fields.where}: the file has {layers} layers, and heads of one layer are supported; "
            "use such a head"
        )
    say_count(fields, "num_hidden_layers", layers)
    for name in extra:
        fields.get(name)
    stated, known = fields.count("vocab_size"), target.config.vocab_size
    if stated < known:
        raise fields.fail("vocab_size", f"{target.name} has {known} tokens; use a head made for it")
    biased = fields.flag("qkv_bias", any(name.endswith(".q_proj.bias") for name in names))
    values = {
        "attention_bias": biased,
        **{name: value for name, value in fields.values.items() if value is not None},
        "num_hidden_layers": 1,
        # The target's value: the field is about its embedding and head.
        "tie_word_embeddings": target.config.tie_word_embeddings,
    }
    layer = Fields(fields.where, values)
    decoder = LLAMA.read(layer, known)
    layer.asked |= fields.asked
    check_unread(layer, implied(decoder), "a head's layer")
    return decoder


def say_count(fields: Fields, name: str, actual: int) -> None:
    """Log a line if the field `name`, a number, differs from `actual`, the number in the file."""
    stated = fields.get(name)
    if stated not in (None, actual):
        fields.integer(name)
        note(f"{fields.where}: {name}={stated}, and the file has {actual}: these are used")


def check_depth(fields: Fields, target: Model, num_taps: int) -> None:
    """Raise InputError if a config says that the head's target has another number of layers.

    `num_taps` is the number of layers that the head reads.
    """
    layers = target.config.num_layers
    # Some of DeepSpec's configs count the layers that are read.
    if fields.get("num_target_layers") not in (None, layers, num_taps):
        raise fields.fail(
            "num_target_layers", f"{target.name} has {layers}; use a head made for it"
        )


def speculators_fields(kind: str, architecture: str, target: str, tokens: int) -> dict[str, Any]:
    """Return the fields of the speculators library that all of its heads have.

    `kind` is its name of the method, `target` the target's name, and `tokens` the default length of
    drafts.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }


def decoder_fields(config: DecoderConfig, dtype: np.dtype) -> dict[str, Any]:
    """Return the fields that `read_decoder` reads, named as in transformers 4 and 5."""
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        **LLAMA.write(config),
        "tie_word_embeddings": False,
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
    }
