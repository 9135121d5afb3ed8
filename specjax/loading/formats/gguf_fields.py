"""The metadata of a GGUF file as typed fields, and the fields that all architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.gguf_file import GgufFile, check_type
from specjax.loading.formats.huggingface_rope import yarn_attention_factor
from specjax.loading.typed_fields import Fields
from specjax.models.config import RopeScaling

MTP_MODULES = "nextn_predict_layers"
"""The key that states the number of multi-token prediction modules."""

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (_FREQUENCIES, _LONG, _SHORT)
"""The tensors that have factors of the rotary frequencies, instead of parameters."""

_UNREAD = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_used_count",
)
"""Keys that do not affect the computation."""

_NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_gating_func": 1,
    "use_parallel_residual": False,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "pooling_type": 0,
}
"""Keys that are accepted with the value that has no effect, unless a family reads them."""


class GgufFields(Fields):
    """The fields of a GGUF file's metadata that begin with the name of its architecture.

    An array of equal values, one per layer, counts as that value. A number is converted to the
    shortest decimal with the same float32: 1e-05, not 9.99999975e-06.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            key.removeprefix(prefix): _normalised(value)
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }
        super().__init__(str(file.path), values, "convert the model again", prefix)
        self.file = file

    def by_layer(self, name: str, num_layers: int) -> list[int]:
        """Return the field `name`, a whole number or a list with one per layer, for each layer.

        Raises InputError for a list of another length.
        """
        values = self._integers(name)
        if len(values) == 1:
            return values * num_layers
        if len(values) != num_layers:
            raise self.fail(name, f"must be a list with an entry for each of {num_layers} layers")
        return values

    def largest(self, name: str) -> int:
        """Return the field `name`, a whole number, or the largest of a list of them."""
        return max(self._integers(name))

    def _integers(self, name: str) -> list[int]:
        value = self.get(name)
        if not isinstance(value, np.ndarray):
            return [self.integer(name)]
        if value.ndim != 1 or not value.size or value.dtype.kind not in "iu":
            raise self.fail(name, f"must be a list of whole numbers; {self.remedy}")
        return value.tolist()

    def check_others(self, fixed: Mapping[str, Any]) -> None:
        """Raise InputError for a field that was not read, unless its value has no effect.

        `fixed` are fields with the values that they have in every file of the family.
        """
        for name, value in {**_NEUTRAL, **fixed}.items():
            if name not in self.asked:
                self.only(name, value)
        unread = [name for name in self.values if name not in self.asked and name not in _UNREAD]
        if unread:
            raise self.unknown(unread, "it may change what is computed; use a model without it")


def _normalised(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        value = value[0].item()
    if type(value) is not float:
        return value
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def read_scaling(fields: GgufFields, rotary_width: int) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies, or None.

    `rotary_width` is the number of rotated dimensions of a head.
    """
    file = fields.file
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    fields.only("rope.scaling.type", "none", "linear", "yarn")
    # Without a type, a factor means linear scaling, as it does for llama.cpp.
    stated = "rope.scaling.type" in fields.values
    scaling = None
    if kind == "yarn":
        scaling = _read_yarn(fields, factor or 1.0)
    elif factor not in (0.0, 1.0) and (kind == "linear" or not stated):
        scaling = RopeScaling("linear", factor=factor)
    factors = {
        name: _read_factors(file, name, rotary_width, scaling)
        for name in ROPE_FACTORS
        if name in file.tensors
    }
    if not factors:
        return scaling
    if _FREQUENCIES in factors:
        return RopeScaling("factors", factors=factors[_FREQUENCIES])
    if lacking := [name for name in (_LONG, _SHORT) if name not in factors]:
        raise InputError(f"{file.path}: {lacking[0]} is missing; convert the model again")
    scaling = RopeScaling(
        "factors",
        factors=factors[_LONG],
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )
    if factors[_SHORT] == factors[_LONG]:
        return scaling
    original = _original_positions(fields)
    return replace(scaling, short_factors=factors[_SHORT], original_max_positions=original)


def _read_factors(
    file: GgufFile, name: str, rotary_width: int, scaling: RopeScaling | None
) -> tuple[float, ...]:
    """Return the factors of frequencies in the tensor `name`, to be the only scaling."""
    tensor = file.tensors[name]
    if scaling is not None or tensor.shape != (rotary_width // 2,):
        other = "" if scaling is None else f" with {scaling.kind} factor {scaling.factor}"
        raise InputError(
            f"{file.path}: {name} {list(tensor.shape)}{other} is "
            f"not supported; it must be [{rotary_width // 2}] and the only scaling"
        )
    check_type(file, name)
    return tuple(float(str(value)) for value in file.values(tensor))


def _original_positions(fields: GgufFields) -> int:
    return fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))


def _read_yarn(fields: GgufFields, factor: float) -> RopeScaling:
    """Return the scaling as llama.cpp computes it, with `factor` times the original context."""
    if not factor > 0:
        raise fields.fail("rope.scaling.factor", "must be a positive number")
    fields.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    attention, usual = fields.number("rope.scaling.attn_factor", 1.0), yarn_attention_factor(factor)
    # Some files repeat the factor that follows from that of the context.
    fields.only("rope.scaling.yarn_attn_factor", 1.0, _normalised(usual))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_positions=_original_positions(fields),
        attention_factor=attention * usual,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
