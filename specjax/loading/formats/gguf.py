"""Llama-family models in GGUF files: config, and weights dequantised to the wanted dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax.errors import InputError, shown
from specjax.loading.formats import build_parameters, parameter_names
from specjax.loading.formats.gguf_file import GgufFile, Tensor, check_type, short
from specjax.models.config import DecoderConfig, RopeScaling


class _Keys:
    """Typed reading of the `llama.*` metadata; records which keys were read."""

    def __init__(self, file: GgufFile) -> None:
        self.path, self.metadata, self.asked = file.path, file.metadata, set[str]()

    def get(self, name: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """One value, or the common value of an array (some files list one per layer)."""
        key = f"llama.{name}"
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
        return self.get(name, (int,), default)

    def real(self, name: str, default: float | None = None) -> float:
        return float(self.get(name, (int, float), default))

    def only(self, name: str, neutral: Any) -> None:
        """Raise InputError for a setting that changes the arithmetic, unless it is `neutral`."""
        value = self.get(name, (bool, int, float, str), neutral)
        if value != neutral:
            raise InputError(
                f"{self.path}: llama.{name}={shown(value)} is not supported (only {neutral!r}); "
                "use a plain Llama model"
            )


_INERT = {
    "llama.vocab_size",
    "llama.tensor_data_layout",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.finetuned",
    "llama.expert_used_count",
}


def check_architecture(file: GgufFile) -> None:
    """Raise InputError unless the file's architecture is the one that `read_config` supports."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != "llama":
        raise InputError(
            f"{file.path}: general.architecture={shown(architecture)} is not supported; "
            "use a GGUF of the architecture 'llama'"
        )


def read_config(file: GgufFile, vocab_size: int) -> DecoderConfig:
    """The decoder that a llama-architecture file describes, with V truncated to `vocab_size`.

    Raises InputError for settings that the decoder does not have.
    """
    keys = _Keys(file)
    width, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = keys.whole("attention.key_length", width // max(heads, 1))
    for name, neutral in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("attention.sliding_window", 0),
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
    config = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=keys.whole("feed_forward_length"),
        num_layers=keys.whole("block_count"),
        num_heads=heads,
        num_kv_heads=keys.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=keys.whole("context_length"),
        rms_norm_eps=_shortest(keys.real("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(keys.real("rope.freq_base", 10000.0)),
        rope_scaling=_read_scaling(file, keys, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )
    unknown = [
        key
        for key in file.metadata
        if key.startswith("llama.") and key not in keys.asked and key not in _INERT
    ]
    if unknown:
        raise InputError(
            f"{file.path}: the key {short(unknown[0])} is not known and may change the "
            "arithmetic; use a plain Llama model"
        )
    return config


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 where the file says 9.99999975e-06."""
    return float(str(np.float32(value)))


def _read_scaling(file: GgufFile, keys: _Keys, head_dim: int) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", (str,), "none")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise InputError(
            f"{file.path}: llama.rope.scaling.type={short(kind)} is not supported; "
            "use none or linear scaling"
        )
    # Without a type, a factor means linear scaling, as it does for llama.cpp.
    linear = factor not in (0.0, 1.0) and (
        kind == "linear" or "llama.rope.scaling.type" not in file.metadata
    )
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return RopeScaling("linear", factor=_shortest(factor)) if linear else None
    if linear or tensor.shape != (head_dim // 2,):
        raise InputError(
            f"{file.path}: rope_freqs.weight {list(tensor.shape)} with linear factor {factor} is "
            f"not supported; it must be [{head_dim // 2}] and the only scaling"
        )
    check_type(file, "rope_freqs.weight")
    factors = file.values(tensor)
    return RopeScaling("factors", factors=tuple(_shortest(value) for value in factors.tolist()))


def read_params(
    file: GgufFile,
    config: DecoderConfig,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
) -> dict[str, Any]:
    """The parameter tree of `parameter_names.param_shapes`, dequantised into its final arrays.

    Raises InputError listing tensors that are missing, unexpected, mis-shaped or of a type that
    cannot be dequantised, before anything is allocated.
    """
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    locations = parameter_names.match(
        str(file.path), parameter_names.GGUF, config, found, ignored=["rope_freqs.weight"]
    )
    for name in {
        file.tensors[location.name].kind: location.name for location in locations
    }.values():
        check_type(file, name)

    def fill(location: parameter_names.Location, target: np.ndarray) -> None:
        _fill(file, file.tensors[location.name], location, target)

    # Largest first, so that the threads finish at similar times.
    locations.sort(key=lambda location: -file.tensors[location.name].size)
    return build_parameters.build(config, dtype, locations, fill, mesh, shards, scan_layers)


def _fill(
    file: GgufFile, tensor: Tensor, location: parameter_names.Location, target: np.ndarray
) -> None:
    """Write one tensor into its part of the tree, rows beyond the vocabulary left out."""
    if location.slot.paired:
        np.copyto(
            target, parameter_names.from_stored(file.values(tensor), location), casting="same_kind"
        )
        return
    rest = location.stored_shape[1:]
    into = parameter_names.stored_view(target, location)
    for first, values in file.chunks(tensor):
        # A chunk is whole rows, small enough to be transposed in the CPU's cache.
        start = first // math.prod(rest)
        part = into[start : start + values.size // math.prod(rest)]
        np.copyto(part, values.reshape(-1, *rest)[: len(part)], casting="same_kind")
