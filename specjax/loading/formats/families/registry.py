"""The supported families, by `model_type` of config.json and by GGUF architecture."""

from __future__ import annotations

from specjax.errors import InputError, shown
from specjax.loading.formats.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from specjax.loading.formats.families.gemma import GEMMA2, GEMMA3
from specjax.loading.formats.families.glm import GLM4, GLM4_MOE
from specjax.loading.formats.families.gpt2 import GPT2
from specjax.loading.formats.families.gpt_oss import GPT_OSS
from specjax.loading.formats.families.granite import GRANITE
from specjax.loading.formats.families.lfm2 import LFM2
from specjax.loading.formats.families.llama import LLAMA, MISTRAL, MIXTRAL
from specjax.loading.formats.families.mamba_hybrids import BAMBA, GRANITE_HYBRID, NEMOTRON_H
from specjax.loading.formats.families.olmo import OLMO2, OLMO3, OLMO_HYBRID
from specjax.loading.formats.families.phi import PHI3
from specjax.loading.formats.families.qwen import MIMO, QWEN2, QWEN3, QWEN3_MOE
from specjax.loading.formats.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from specjax.loading.formats.families.smollm3 import SMOLLM3
from specjax.loading.formats.families.text_parts import (
    GEMMA3_PART,
    MISTRAL3_PART,
    QWEN3_5_MOE_PART,
    QWEN3_5_PART,
    TextPart,
)
from specjax.loading.formats.family import Family
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.models.config import DecoderConfig

FAMILIES: dict[str, Family] = {
    member.model_type: member
    for member in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA2,
        GEMMA3,
        GPT2,
        GLM4,
        GLM4_MOE,
        MIMO,
        SMOLLM3,
        OLMO2,
        OLMO3,
        OLMO_HYBRID,
        PHI3,
        GRANITE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        LFM2,
        GRANITE_HYBRID,
        BAMBA,
        NEMOTRON_H,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
TEXT_PARTS: dict[str, TextPart] = {
    part.model_type: part for part in (GEMMA3_PART, MISTRAL3_PART, QWEN3_5_PART, QWEN3_5_MOE_PART)
}
"""The multimodal models whose text part is read, by `model_type`."""
_REFUSED = {
    "gemma4": "heads of two widths, and inputs for each layer",
    "gemma4_text": "heads of two widths, and inputs for each layer",
    "deepseek_v32": "sparse attention",
    "falcon_h1": "attention and Mamba-2 side by side in each layer",
    "phi3small": "blocksparse attention",
    "phimoe": "a router that masks experts by their distance",
    "ministral3": "queries scaled by their position",
}
"""Unsupported families that users often try, and the features that the decoder lacks."""


def family(model_type: object) -> Family:
    """Return the family with this `model_type`; raise InputError if it is unknown."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = ""
    if isinstance(model_type, str) and model_type in _REFUSED:
        reason = f": it has {_REFUSED[model_type]}"
    raise InputError(
        f"model_type={shown(model_type)} is not supported{reason}; use a model of the type "
        f"{' or '.join(map(repr, (*FAMILIES, *TEXT_PARTS)))}"
    )


def text_part(model_type: object) -> TextPart | None:
    """Return which text part a multimodal model of this `model_type` has, None if it is another."""
    return TEXT_PARTS.get(model_type) if isinstance(model_type, str) else None


def gguf_architectures() -> dict[str, list[Family]]:
    """Return the families that can be read from GGUF files, by the files' architecture."""
    by_architecture: dict[str, list[Family]] = {}
    for member in FAMILIES.values():
        if member.gguf is not None:
            by_architecture.setdefault(member.gguf.architecture, []).append(member)
    return by_architecture


def tensors(config: DecoderConfig) -> tuple[TensorEntry, ...]:
    """Return the names of a decoder's tensors in Hugging Face's layout."""
    return family(config.family).tensors
