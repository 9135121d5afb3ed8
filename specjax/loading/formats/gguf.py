"""Models in GGUF files: config, and weights dequantized to a dtype or kept in their blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from jax.sharding import Mesh
from jaxtyping import UInt8

from specjax.errors import InputError, shown
from specjax.loading.formats import build_parameters, mtp_layers, parameter_names, tensor_layout
from specjax.loading.formats.families import registry
from specjax.loading.formats.family import Family
from specjax.loading.formats.gguf_fields import MTP_MODULES, GgufFields
from specjax.loading.formats.gguf_file import GgufFile, check_type
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig
from specjax.models.layers.quantized import GROUP, QuantizedKernel

_OF_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_BLOCK_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_UNROUNDED = ("F32", "F16", "BF16")


def family_of(file: GgufFile) -> Family:
    """Return the family of a file's architecture; raise InputError if it is unknown."""
    name = file.metadata.get("general.architecture")
    families = registry.gguf_architectures().get(name) if isinstance(name, str) else None
    if families is None:
        known = ", ".join(map(repr, registry.gguf_architectures()))
        raise InputError(
            f"{file.path}: general.architecture={shown(name)} is not supported; "
            f"use a GGUF of the architecture {known}"
        )
    experts = GgufFields(file, name).integer("expert_count", 0) > 0
    fitting = [family for family in families if family.gguf.experts == experts]
    return (fitting or families)[0]


def embedding_rows(file: GgufFile) -> int | None:
    """Return the number of rows of the embedding matrix, or None if the file has none."""
    tensor = file.tensors.get("token_embd.weight")
    return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else None


def read_config(
    file: GgufFile, vocab_size: int, unused_tokens: tuple[int, ...] = ()
) -> tuple[DecoderConfig, MtpConfig | None]:
    """Return the config of the decoder in a file, and that of its MTP modules or None.

    MTP is multi-token prediction. The vocabulary is truncated to `vocab_size` ids; `unused_tokens`
    are the ids among them that have no token. Raises InputError for an unknown architecture and for
    features that the decoder lacks.
    """
    family = family_of(file)
    assert family.gguf is not None
    layout = family.gguf
    fields = GgufFields(file, layout.architecture)
    config = family.read(fields, vocab_size, unused_tokens)
    modules = 0 if layout.mtp is None else fields.integer(MTP_MODULES, 0)
    fields.check_others({**layout.fixed, "attention.value_length": config.head_dim})
    modules = mtp_layers.stored(str(file.path), modules, config, layout.mtp, file.tensors)
    return config, mtp_layers.module_config(config, modules, layout.mtp)


def read_params(
    file: GgufFile,
    config: DecoderConfig,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    mtp: MtpConfig | None = None,
    keep_blocks: bool = False,
    bits: Mapping[parameter_names.Path, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the parameters of a decoder and, under "mtp", of its MTP modules, if any.

    With `keep_blocks`, kernels that the file has in 4 or 8 bits keep these bits (`kept_bits`), on a
    CPU without a mesh; other tensors are dequantized to `dtype`, and kernels at the paths in `bits`
    rounded on the devices (`build_parameters.build`). Raises InputError, before
    allocating anything, that lists tensors that are missing, unexpected, mis-shaped or of a type
    that cannot be dequantized.
    """
    layout = registry.family(config.family).gguf
    assert layout is not None
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    for name in filter(_OF_ONE_EXPERT.fullmatch, shapes):
        raise InputError(
            f"{file.path}: the tensor {name} is of one expert, as in old files; "
            "convert the model again, into one tensor of all experts"
        )
    modules = mtp_layers.locations(config, mtp, layout.mtp, layout.tensors)
    copies = mtp_layers.copies(config, mtp, layout.mtp)
    locations = parameter_names.match(
        str(file.path),
        layout.tensors,
        config,
        shapes,
        others=modules,
        ignored=["rope_freqs.weight", *copies],
    )
    _check_copies(file, copies)
    for name in {
        file.tensors[location.name].kind: location.name for location in (*locations, *modules)
    }.values():
        check_type(file, name)

    # Largest first, so that the threads finish at similar times.
    locations.sort(key=lambda location: -file.tensors[location.name].size)
    kept = kept_bits(file, config, scan_layers) if keep_blocks else {}

    def read(location: parameter_names.Location, rows: slice, inputs: slice) -> Any:
        tensor, (path, _) = file.tensors[location.name], location.within(scan_layers)
        if path in kept:
            found: Any = _read_blocks(file.raw(tensor), tensor.kind.name, location, rows)
        else:
            index = tensor_layout.own_rows(location, rows, inputs)
            found = tensor_layout.from_stored(file.values(tensor, index), location)
        file.release(tensor)
        return found

    return build_parameters.build(
        *(config, mtp, dtype, [*locations, *modules], read, mesh, shards, scan_layers),
        bits={**bits, **kept},
    )


def read_padding(file: GgufFile, config: DecoderConfig, dtype: np.dtype) -> np.ndarray | None:
    """Return the rows of the embedding after those of the vocabulary, or None if there are none."""
    if (embedding_rows(file) or 0) <= config.vocab_size:
        return None
    rows = (slice(config.vocab_size, None), slice(None))
    return file.values(file.tensors["token_embd.weight"], rows).astype(dtype)


def kept_bits(
    file: GgufFile, config: DecoderConfig, scan_layers: bool = True
) -> dict[parameter_names.Path, int]:
    """Return the bits of the kernels that can keep the file's blocks, by their paths in the tree.

    These are kernels with 4 bits in all layers (Q4_0, Q4_1) or 8 in all (Q8_0).
    """
    layout = registry.family(config.family).gguf
    assert layout is not None
    bits_of_path: dict[parameter_names.Path, set[int | None]] = {}
    for location in parameter_names.locations(layout.tensors, config):
        tensor = file.tensors.get(location.name)
        fits = location.is_kernel and not location.entry.transposed
        bits = _BLOCK_BITS.get(tensor.kind.name) if tensor is not None and fits else None
        bits_of_path.setdefault(location.within(scan_layers)[0], set()).add(bits)
    return {
        path: min(bits)
        for path, bits in bits_of_path.items()
        if len(bits) == 1 and None not in bits
    }


def _check_copies(file: GgufFile, copies: Mapping[str, str]) -> None:
    """Raise InputError if a tensor differs from the tensor that it must repeat.

    `copies` maps the names of copies to those of their originals. Quantized copies may have been
    rounded differently.
    """
    for copy, original in copies.items():
        if copy not in file.tensors:
            continue
        # A tied head is stored as the embedding.
        original = original if original in file.tensors else "token_embd.weight"
        duplicate, other = file.tensors[copy], file.tensors[original]
        if duplicate.kind != other.kind or duplicate.kind.name not in _UNROUNDED:
            continue
        if not np.array_equal(file.raw(duplicate), file.raw(other)):
            raise InputError(
                f"{file.path}: {copy} differs from {original}; modules of this kind share it"
            )


def _read_blocks(
    raw: UInt8[np.ndarray, "bytes"], kind: str, location: parameter_names.Location, rows: slice
) -> QuantizedKernel:
    """Return some rows of a tensor in blocks: a half-precision scale, a minimum, integers."""
    count, width = location.rows
    index, parts = location.entry.part
    groups = width // GROUP
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = raw.reshape(parts, -1, groups, block_bytes)[index, :count][rows]
    blocks = tensor_layout.from_stored(blocks, location)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    first = 4 if kind == "Q4_1" else 2
    values = blocks[..., first:].reshape(len(blocks), -1)
    if kind == "Q8_0":
        return QuantizedKernel(values.view(np.int8), scales, None)
    minimums = -8 * scales
    if kind == "Q4_1":
        minimums = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    return QuantizedKernel(values, scales, minimums)
