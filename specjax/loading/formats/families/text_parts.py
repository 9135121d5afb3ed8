"""Multimodal models whose text part is read: where their files have it.

The text part is a model of another family, which is what it is saved as.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

TEXT, TIED = "text_config", "tie_word_embeddings"
"""The field of config.json with the text part's fields, and one that may be beside it instead."""


@dataclass(frozen=True)
class TextPart:
    """The text part of the multimodal models of a `model_type`, which `architecture` runs.

    `family` is the model type of the text part. `defaults` are the values of fields that published
    files leave out, where they differ from the family's. `others` are fields that concern the other
    parts, and `skipped` matches the names of their tensors.
    """

    model_type: str
    architecture: str
    family: str
    others: frozenset[str]
    skipped: str
    defaults: Mapping[str, Any]

    def text_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the text part, given those of config.json; none if it has none."""
        section = values.get(TEXT)
        if not isinstance(section, dict):
            return {}
        text = {"model_type": self.family, **section}
        text |= {name: one for name, one in self.defaults.items() if text.get(name) is None}
        return text if values.get(TIED) is None else text | {TIED: values[TIED]}

    def skips(self, name: str) -> bool:
        """Return whether the tensor `name` belongs to another part."""
        return re.match(self.skipped, name) is not None


_IMAGES = frozenset({"vision_config", "image_token_index", "image_token_id"})
_SKIPPED = r"(model\.)?(vision_tower|multi_modal_projector)\."

GEMMA3_PART = TextPart(
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    family="gemma3_text",
    others=_IMAGES | {"mm_tokens_per_image"},
    skipped=_SKIPPED,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
)
QWEN3_5_PART = TextPart(
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    family="qwen3_5_text",
    others=_IMAGES | {"video_token_id", "vision_start_token_id", "vision_end_token_id"},
    skipped=r"(model\.)?visual\.",
    defaults={},
)
QWEN3_5_MOE_PART = replace(
    QWEN3_5_PART,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    family="qwen3_5_moe_text",
)
MISTRAL3_PART = TextPart(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    family="mistral",
    others=_IMAGES
    | {
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "vision_feature_layer",
    },
    skipped=_SKIPPED,
    defaults={},
)
