"""Models in GGUF files: config, and weights dequantised to the wanted dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax.errors import InputError, shown
from specjax.loading.formats import build_parameters, parameter_names
from specjax.loading.formats.families import registry
from specjax.loading.formats.families.family import Family
from specjax.loading.formats.gguf_file import GgufFile, Tensor, check_type
from specjax.loading.formats.gguf_keys import GgufKeys
from specjax.models.config import DecoderConfig


def family_of(file: GgufFile) -> Family:
    """The family of a file's architecture; raises InputError for one that is not known."""
    name = file.metadata.get("general.architecture")
    family = registry.gguf_architectures().get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(map(repr, registry.gguf_architectures()))
        raise InputError(
            f"{file.path}: general.architecture={shown(name)} is not supported; "
            f"use a GGUF of the architecture {known}"
        )
    return family


def read_config(file: GgufFile, vocab_size: int) -> DecoderConfig:
    """The decoder that a file describes, with V truncated to `vocab_size`.

    Raises InputError for another architecture and for settings that the decoder does not have.
    """
    family = family_of(file)
    assert family.gguf is not None
    keys = GgufKeys(file, family.gguf.architecture)
    config = DecoderConfig(
        vocab_size=vocab_size, family=family.model_type, **family.gguf.read(keys)
    )
    keys.check_asked()
    return config


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
    layout = registry.family(config.family).gguf
    assert layout is not None
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    locations = parameter_names.match(
        str(file.path), layout.tensors, config, found, ignored=["rope_freqs.weight"]
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
    if not location.is_plain:
        np.copyto(
            target, parameter_names.from_stored(file.values(tensor), location), casting="same_kind"
        )
        return
    rest = location.rows[1:]
    into = parameter_names.stored_view(target, location)
    for first, values in file.chunks(tensor):
        # A chunk is whole rows, small enough to be transposed in the CPU's cache.
        start = first // math.prod(rest)
        part = into[start : start + values.size // math.prod(rest)]
        np.copyto(part, values.reshape(-1, *rest)[: len(part)], casting="same_kind")
