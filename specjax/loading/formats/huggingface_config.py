"""The config.json of a model, with the field names of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.formats import mtp_layers
from specjax.loading.formats.families import registry
from specjax.loading.formats.families.text_parts import TEXT, TIED, TextPart
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.tokenizers.huggingface_tokenizer import end_fields, read_json, write_json
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.loading.typed_fields import Fields
from specjax.models.config import DecoderConfig


def embedding_rows(directory: Path) -> int | None:
    """Return the number of embedding rows that config.json states, or None."""
    values = read_json(directory / "config.json")
    if (part := registry.text_part(values.get("model_type"))) is not None:
        values = part.text_values(values)
    value = values.get("vocab_size")
    return value if type(value) is int and value > 0 else None


def text_part(directory: Path) -> TextPart | None:
    """Return which text part a directory's config.json describes, None if it is all of it."""
    return registry.text_part(read_json(directory / "config.json").get("model_type"))


def read_config(
    directory: Path, vocab_size: int | None, unused_tokens: tuple[int, ...] = ()
) -> tuple[DecoderConfig, int]:
    """Return the config of the decoder in config.json, and how many MTP modules it announces.

    MTP is multi-token prediction. The vocabulary is truncated to `vocab_size` ids if given;
    `unused_tokens` are ids without a token. Of a multimodal model the config is that of its text
    part. Raises InputError, naming the field, for an unknown model type and for features that the
    decoder or the family lacks.
    """
    path = directory / "config.json"
    raw = read_json(path)
    if not raw and (directory / "adapter_config.json").exists():
        raise InputError(
            f"{directory}: an adapter without its model; merge it into the model first "
            "(merge_and_unload in peft) and save that"
        )
    if not raw:
        raise InputError(
            f"{path}: missing or empty; give a .gguf file or a directory with config.json, "
            "model.safetensors and tokenizer.json"
        )
    fields = Fields(str(path), raw)
    if (part := registry.text_part(raw.get("model_type"))) is not None:
        _check_architecture(fields, part.architecture, part.model_type)
        fields = _text_fields(fields, part)
    try:
        family = registry.family(fields.get("model_type"))
    except InputError as error:
        raise InputError(f"{fields.where}: {error}") from None
    _check_architecture(fields, family.architecture, family.model_type)
    modules = mtp_layers.announced(fields)
    stated = fields.integer("vocab_size")
    config = family.read(fields, stated if vocab_size is None else vocab_size, unused_tokens)
    check_unread(fields, implied(config), f"a model of model_type={family.model_type!r}")
    return config, modules


def _text_fields(fields: Fields, part: TextPart) -> Fields:
    """Return the fields of a multimodal model's text part, after checking those around it."""
    values = fields.section(TEXT)
    if not values.values:
        raise fields.fail(TEXT, f"a model of model_type={part.model_type!r} must have one")
    values = Fields(values.where, part.text_values(fields.values))
    fields.asked |= part.others | {TEXT, TIED}
    check_unread(fields, {}, f"a model of model_type={part.model_type!r}")
    if values.get("model_type") in registry.FAMILIES:
        values.only("model_type", part.family)
    return values


def _check_architecture(fields: Fields, architecture: str, model_type: str) -> None:
    """Raise InputError if config.json names a class that is not `architecture` or its base."""
    named = fields.get("architectures")
    if not named:
        return
    fitting = {architecture, model_type.replace("_", "")}
    stem = re.compile("(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
    stems = {stem.sub("", name).lower() for name in fitting}
    if not isinstance(named, list) or {stem.sub("", str(name)).lower() for name in named} - stems:
        raise fields.fail(
            "architectures",
            f"is not supported; of model_type={model_type!r} only {architecture} is",
        )


def write_config(
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
    dtype: np.dtype,
    directory: Path,
) -> None:
    """Write config.json with the rope and dtype fields of transformers 4 and 5.

    `ends` are the ids that end a sequence. Raises InputError for a config that the family's fields
    cannot express.
    """
    family = registry.family(config.family)
    written = family.write(config)
    # The tokenizer says which ids name no token.
    fields = Fields("config.json", written)
    again = family.read(fields, config.vocab_size, config.unused_tokens)
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
