"""Typed reading of the metadata of a GGUF file, and what all architectures share in it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.formats.gguf_file import GgufFile, check_type, short
from specjax.models.config import Experts, RopeScaling

MTP_MODULES = "nextn_predict_layers"
"""The key of the number of modules for multi-token prediction."""

_INERT = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_used_count",
)


class GgufKeys:
    """Typed reading of a file's `{architecture}.*` metadata; records which keys were read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.path, self.metadata = file, file.path, file.metadata
        self.architecture, self.asked = architecture, set[str]()

    def fail(self, name: str, reason: str) -> InputError:
        """The error for a key's value."""
        return InputError(f"{self.path}: {self.architecture}.{name}{reason}")

    def get(self, name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """One value, or the common value of an array (some files list one per layer)."""
        key = f"{self.architecture}.{name}"
        self.asked.add(key)
        value = self.metadata.get(key, default)
        if value is None:
            raise InputError(f"{self.path}: the key {key} is missing; convert the model again")
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) not in kinds:
            raise InputError(
                f"{self.path}: {key} is {short(str(value))}, which is not supported; "
                "use a model whose layers are alike"
            )
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return self.get(name, (int,), default)

    def real(self, name: str, default: float | None = None) -> float:
        """A number, as the shortest decimal that is the same float32: 1e-05, not 9.99999975e-06."""
        return float(str(np.float32(self.get(name, (int, float), default))))

    def optional_real(self, name: str, default: float | None = None) -> float | None:
        """A number, or `default` where the file has none."""
        self.asked.add(f"{self.architecture}.{name}")
        present = f"{self.architecture}.{name}" in self.metadata
        return self.real(name) if present else default

    def only(self, name: str, neutral: Any) -> None:
        """Raise InputError for a setting that changes the arithmetic, unless it is `neutral`."""
        value = self.get(name, (bool, int, float, str), neutral)
        if value != neutral:
            raise InputError(
                f"{self.path}: {self.architecture}.{name}={shown(value)} is not supported (only "
                f"{neutral!r}); use a model without it"
            )

    def check_asked(self) -> None:
        """Raise InputError for a key of the architecture that nobody has read."""
        prefix = f"{self.architecture}."
        inert = {prefix + name for name in _INERT}
        unknown = [
            key
            for key in self.metadata
            if key.startswith(prefix) and key not in self.asked and key not in inert
        ]
        if unknown:
            raise InputError(
                f"{self.path}: the key {short(unknown[0])} is not known and may change the "
                "arithmetic; use a model without it"
            )


def read_sizes(keys: GgufKeys, norm: str = "rms", experts: bool = False) -> dict[str, Any]:
    """The fields of `DecoderConfig` that files of every architecture have.

    Raises InputError for settings that no family has, and for experts unless there may be some.
    """
    width, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", width // max(heads, 1))
    for name, neutral in (
        ("attention.value_length", head_dim),
        *([] if experts else [("expert_count", 0)]),
        ("attention.causal", True),
        ("use_parallel_residual", False),
        ("attention.scale", 0.0),
        ("attention.clamp_kqv", 0.0),
        ("logit_scale", 1.0),
        ("residual_scale", 1.0),
        ("embedding_scale", 1.0),
        ("rope.scaling.attn_factor", 1.0),
        ("pooling_type", 0),
    ):
        keys.only(name, neutral)
    epsilon = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    return {
        "hidden_size": width,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_layers": keys.whole("block_count"),
        "num_heads": heads,
        "num_kv_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_positions": keys.whole("context_length"),
        "rms_norm_eps": keys.real(f"attention.{epsilon}"),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
    }


def read_experts(
    keys: GgufKeys, router: Literal["softmax", "sigmoid"], size: int | None = None
) -> Experts:
    """The experts of a file whose architecture has that router.

    `size` is the width of an expert where the file does not state it; None: it must.
    """
    keys.only("expert_gating_func", {"softmax": 1, "sigmoid": 2}[router])
    return Experts(
        num_experts=keys.whole("expert_count"),
        per_token=keys.whole("expert_used_count"),
        intermediate_size=keys.whole("expert_feed_forward_length", size),
        router=router,
    )


def read_rope(keys: GgufKeys, rotary_width: int, theta: float = 10000.0) -> dict[str, Any]:
    """The rotary base and its scaling, for so many rotated dimensions of a head."""
    keys.only("rope.dimension_count", rotary_width)
    return {
        "rope_theta": keys.real("rope.freq_base", theta),
        "rope_scaling": _read_scaling(keys, rotary_width),
    }


def _read_scaling(keys: GgufKeys, rotary_width: int) -> RopeScaling | None:
    file = keys.file
    kind = keys.get("rope.scaling.type", (str,), "none")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise keys.fail(
            "rope.scaling.type", f"={short(kind)} is not supported; use none or linear scaling"
        )
    # Without a type, a factor means linear scaling, as it does for llama.cpp.
    linear = factor not in (0.0, 1.0) and (
        kind == "linear" or f"{keys.architecture}.rope.scaling.type" not in file.metadata
    )
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return RopeScaling("linear", factor=factor) if linear else None
    if linear or tensor.shape != (rotary_width // 2,):
        raise InputError(
            f"{file.path}: rope_freqs.weight {list(tensor.shape)} with linear factor {factor} is "
            f"not supported; it must be [{rotary_width // 2}] and the only scaling"
        )
    check_type(file, "rope_freqs.weight")
    factors = file.values(tensor)
    return RopeScaling("factors", factors=tuple(float(str(value)) for value in factors))
