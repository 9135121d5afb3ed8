"""P-EAGLE heads in vLLM's layout, as Amazon's are published, and in that of speculators.

Both are EAGLE-3's (`methods.eagle.layout`) with further layers, `layers.1` on, and `mask_hidden`, a
vector as wide as all taps (the number of its axes differs by tool). The mask token is
`ptd_token_id` or `pard_token` in vLLM's configs and `mask_token_id` in others; its embedding is a
row of `embed_tokens`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.parameter_names import TensorEntry
from specjax.methods.eagle import layout as eagle
from specjax.methods.heads import config_fields
from specjax.methods.heads.config_fields import Export, HeadFields, HeadPart
from specjax.methods.heads.published_layout import PublishedLayout, decoder_tensors
from specjax.methods.peagle.head import KIND, PEagleConfig

_MASK_TOKEN = ("ptd_token_id", "pard_token", "mask_token_id")
_OF_TRAINING = "num_depths", "para_num", "down_sample_ratio", "down_sample_ratio_min", "loss_type"
_INSTEAD = {
    eagle.ONE_LAYER: config_fields.layers(LLAMA, eagle.MODEL_TYPES, "layers are Llama's"),
    eagle.OF_SPECULATORS: config_fields.speculators(
        {KIND: "PEagleSpeculator"}, lambda _: KIND, lambda _: eagle.SPECULATIVE_TOKENS
    ),
}
"""The parts of config.json that are other ones than EAGLE-3's."""


def _read(fields: HeadFields, known: Values) -> Values:
    """Return the mask token; bring `mask_hidden` into the form [1, 1, N]."""
    stated = [name for name in _MASK_TOKEN if fields.get(name) is not None] or ["mask_token_id"]
    token = fields.integer(stated[0])
    for name in stated[1:]:
        fields.agree(name, token, f"{stated[0]} has {token}; repair config.json")
    fields.only("parallel_drafting", True)
    fields.tensors[eagle.MASK] = fields.tensors[eagle.MASK].reshape(1, 1, -1)
    return {"mask_token_id": token}


def _of(layout: PublishedLayout, token: str) -> PublishedLayout:
    """Return the layout of P-EAGLE that belongs to one of EAGLE-3; it calls the mask `token`."""

    def write(export: Export) -> dict[str, Any]:
        return {token: export.config.mask_token_id}

    def changed(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(_INSTEAD.get(part, part) for part in parts)

    fields = {section: changed(parts) for section, parts in layout.fields.items()}
    further = decoder_tensors("layers.{layer}", ("layers", "{layer}"))
    return replace(
        layout,
        kind=KIND,
        config=PEagleConfig,
        signs=layout.signs._replace(names=(*layout.signs.names, eagle.MASK), without=None),
        fields={
            **fields,
            "": (*fields[""], HeadPart(_read, write), config_fields.ignored(*_OF_TRAINING)),
        },
        tensors=(
            *layout.tensors,
            *(entry for entry in further if entry.path[0] == "layers"),
            TensorEntry(eagle.MASK, ("mask", "features")),
        ),
        what="a head's layers",
    )


LAYOUTS = (
    replace(_of(eagle.EAGLE3, "ptd_token_id"), name=KIND),
    _of(eagle.SPECULATORS, "mask_token_id"),
)
