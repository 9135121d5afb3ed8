"""config.json of a model, with the field names of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.formats import mtp_layers
from specjax.loading.formats.families import registry
from specjax.loading.formats.family import Family
from specjax.loading.formats.json_fields import Fields
from specjax.loading.tokenizers.huggingface_tokenizer import end_fields, read_json, write_json
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig

_INERT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_num_labels",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
    }
)
"""Fields of transformers' configs that change nothing in the logits."""


def embedding_rows(directory: Path) -> int | None:
    """The number of tokens that the embedding has by config.json; None where it does not say."""
    value = read_json(directory / "config.json").get("vocab_size")
    return value if type(value) is int and value > 0 else None


def read_config(
    directory: Path, vocab_size: int | None, unused_tokens: tuple[int, ...] = ()
) -> tuple[DecoderConfig, MtpConfig | None]:
    """The decoder that config.json describes, and the modules for multi-token prediction in it.

    V is truncated to `vocab_size` where that is known; `unused_tokens` name no token.

    Reads the fields of transformers 4 and 5. Raises InputError for a model type that is not known,
    and, by name, for settings that the decoder does not have and fields that the family has not.
    """
    path = directory / "config.json"
    raw = read_json(path)
    if not raw:
        raise InputError(
            f"{path}: missing or empty; give a .gguf file or a directory with config.json, "
            "model.safetensors and tokenizer.json"
        )
    try:
        family = registry.family(raw.get("model_type"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    fields = Fields(str(path), raw)
    fields.get("model_type")
    fields.only("architectures", [family.architecture])
    fields.only("quantization_config")
    modules = mtp_layers.count_modules(fields, family)
    stated = fields.integer("vocab_size")
    config = _config(family, fields, stated if vocab_size is None else vocab_size)
    config = dataclasses.replace(config, unused_tokens=unused_tokens)
    fields.check_asked(_INERT)
    return config, mtp_layers.module_config(config, modules, family.mtp)


def _config(family: Family, fields: Fields, vocab_size: int) -> DecoderConfig:
    return DecoderConfig(vocab_size=vocab_size, family=family.model_type, **family.read(fields))


def write_config(
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
    dtype: np.dtype,
    directory: Path,
) -> None:
    """Write config.json with the rope and dtype fields of both transformers 4 and 5.

    `ends` are the ids that end a sequence. Raises InputError for a config whose family has no
    fields for it.
    """
    family = registry.family(config.family)
    written: dict[str, Any] = dict(family.write(config))
    again = _config(family, Fields("config.json", written), config.vocab_size)
    # The tokenizer says which ids name no token.
    again = dataclasses.replace(again, unused_tokens=config.unused_tokens)
    for field in dataclasses.fields(config):
        mine, read = getattr(config, field.name), getattr(again, field.name)
        if mine != read:
            raise InputError(
                f"{field.name}={shown(mine)}: models of the family {config.family!r} have "
                f"{shown(read)}, and its config.json cannot say otherwise; use another family"
            )
    write_json(
        directory / "config.json",
        {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            "vocab_size": config.vocab_size,
            **written,
            "dtype": dtype.name,
            "torch_dtype": dtype.name,
            **end_fields(tokenizer, ends),
        },
    )
