"""The families that are known, by `model_type` and by architecture of GGUF."""

from __future__ import annotations

from specjax.errors import InputError, shown
from specjax.loading.formats.families import (
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt2,
    llama,
    mimo,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from specjax.loading.formats.family import Family
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.models.config import DecoderConfig

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        llama,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
        gemma2,
        gemma3,
        gpt2,
        glm4,
        glm4_moe,
        mimo,
    )
}
_REFUSED = {
    "gemma3": "images beside the text (of 'gemma3_text', such as 1B, they are not there)",
    "deepseek_v3": "multi-head latent attention",
    "qwen3_next": "linear attention",
}
"""Families that are often asked for, and what of them the decoder does not have."""


def family(model_type: object) -> Family:
    """The family of a `model_type`; raises InputError for one that is not known."""
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if isinstance(model_type, str) and model_type in _REFUSED:
        raise InputError(
            f"model_type={shown(model_type)} is not supported: it has {_REFUSED[model_type]}; use "
            f"a model of the type {' or '.join(map(repr, FAMILIES))}"
        )
    if found is None:
        raise InputError(
            f"model_type={shown(model_type)} is not supported; use a model of the type "
            f"{' or '.join(map(repr, FAMILIES))}"
        )
    return found


def gguf_architectures() -> dict[str, list[Family]]:
    """The families that are read from GGUF, by their architecture there."""
    found: dict[str, list[Family]] = {}
    for one in FAMILIES.values():
        if one.gguf is not None:
            found.setdefault(one.gguf.architecture, []).append(one)
    return found


def tensors(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """The names of a decoder's tensors in Hugging Face's layout."""
    return family(config.family).tensors
