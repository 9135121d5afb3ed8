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
from specjax.loading.formats.gguf_fields import MTP_MODULES, ROPE_FACTORS, GgufFields
from specjax.loading.formats.gguf_file import GgufFile, Tensor, check_type
from specjax.models.config import DecoderConfig
from specjax.models.cpu import tiles
from specjax.models.layers.quantized import GROUP
from specjax.models.layers.tiled_kernel import Layout
from specjax.models.mtp import MtpConfig

_OF_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
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
    fields = GgufFields(file, name)
    experts = fields.integer("expert_count", 0) > 0
    windows = fields.integer("attention.sliding_window", 0) > 0

    def fit(family: Family) -> tuple[bool, bool]:
        assert family.gguf is not None
        return family.gguf.experts == experts, family.gguf.windows == windows

    return max(families, key=fit)


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
    kept: Mapping[parameter_names.Path, Layout] = MappingProxyType({}),
    bits: Mapping[parameter_names.Path, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the parameters of a decoder and, under "mtp", of its MTP modules, if any.

    Kernels with a layout in `kept` keep the file's types (`kept_layouts`); other tensors are
    dequantized to `dtype`, and kernels at the paths in `bits` rounded on the devices
    (`build_parameters.build`). Raises InputError, before allocating anything, that lists tensors
    that are missing, unexpected, mis-shaped or of a type that cannot be dequantized.
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
        ignored=[*ROPE_FACTORS, *copies],
    )
    _check_copies(file, copies)
    for name in {
        file.tensors[location.name].kind: location.name for location in (*locations, *modules)
    }.values():
        check_type(file, name)

    # Largest first, so that the threads finish at similar times.
    locations.sort(key=lambda location: -file.tensors[location.name].size)

    def read(location: parameter_names.Location, rows: slice, inputs: slice) -> Any:
        tensor, (path, _) = file.tensors[location.name], location.within(scan_layers)
        if path in kept:
            found: Any = _read_blocks(file.raw(tensor), tensor.kind, location, rows)
        elif location.entry.flat:
            found = _read_flat(file, tensor, location)[rows]
            found = found[:, inputs] if found.ndim > 1 else found
        elif location.apart is not None:
            found = tensor_layout.read_in_order(
                location,
                rows,
                lambda some: file.values(tensor, tensor_layout.own_rows(location, some)),
            )[:, inputs]
        else:
            index = tensor_layout.own_rows(location, rows, inputs)
            found = tensor_layout.from_stored(file.values(tensor, index), location)
        if rows.stop is None or rows.stop >= location.rows[0]:
            file.release(tensor)
        return found

    return build_parameters.build(
        *(config, mtp, dtype, [*locations, *modules], read, mesh, shards, scan_layers),
        bits=bits,
        kept=kept,
    )


def read_padding(file: GgufFile, config: DecoderConfig, dtype: np.dtype) -> np.ndarray | None:
    """Return the rows of the embedding after those of the vocabulary, or None if there are none."""
    if (embedding_rows(file) or 0) <= config.vocab_size:
        return None
    rows = (slice(config.vocab_size, None), slice(None))
    return file.values(file.tensors["token_embd.weight"], rows).astype(dtype)


def kept_layouts(file: GgufFile, config: DecoderConfig) -> dict[parameter_names.Path, Layout]:
    """Return the layouts in tiles of the kernels that can keep the file's types, by path.

    These are kernels, and the table of embeddings, of which all layers have types that the library
    for CPUs multiplies. Layers are stacked.
    """
    layout = registry.family(config.family).gguf
    assert layout is not None
    slots: dict[parameter_names.Path, dict[tuple[int, ...], list[parameter_names.Location]]] = {}
    for location in parameter_names.locations(layout.tensors, config):
        path, index = location.within(scan_layers=True)
        slots.setdefault(path, {}).setdefault(index, []).append(location)
    layouts = {}
    for path, by_index in slots.items():
        in_order = [by_index[index] for index in sorted(by_index)]
        layers = [_parts(file, locations) for locations in in_order]
        if all(layers):
            lead = tuple(size + 1 for size in max(by_index))
            layouts[path] = Layout.of(lead, in_order[0][0].rows[1], layers)
    return layouts


def types_without_products(file: GgufFile) -> set[str]:
    """Return the types in few bits of the file's tensors that have no products as they are."""
    stored = {tensor.kind.name for tensor in file.tensors.values()}
    return stored - {"F32", "F64"} - tiles.formats().keys()


def _parts(
    file: GgufFile, locations: list[parameter_names.Location]
) -> tuple[tuple[str, int], ...]:
    """Return the parts, (type, outputs), of a kernel that some locations fill; none if it cannot.

    Neighbouring outputs of one type are one part.
    """
    parts: list[tuple[str, int]] = []
    for location in sorted(locations, key=lambda location: location.section.start):
        tensor = file.tensors.get(location.name)
        fits = (location.is_kernel or location.path == ("embed", "embedding")) and (
            not location.entry.transposed and not location.entry.added
        )
        # Inputs in another order may be in the same block.
        fits = fits and not (location.apart is not None and "output" in location.path)
        if tensor is None or not fits or tensor.kind.name not in tiles.formats():
            return ()
        if location.rows[1] % GROUP:
            return ()
        parts.append((tensor.kind.name, location.section.width))
    if len(parts) == 1:
        return ((parts[0][0], locations[0].rows[0]),)
    blocks = locations[0].rows[0] // locations[0].section.width
    joined: list[tuple[str, int]] = []
    for name, rows in parts * blocks:
        before = joined.pop() if joined and joined[-1][0] == name else (name, 0)
        joined.append((name, before[1] + rows))
    return tuple(joined)


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


def _read_flat(file: GgufFile, tensor: Tensor, location: parameter_names.Location) -> np.ndarray:
    """Return a location of which the file's tensor has the numbers, but maybe not the shape."""
    values = file.values(tensor).reshape(location.stored_shape)
    if location.entry.decay and not (values < 0).all():
        raise InputError(
            f"{file.path}: the tensor {location.name} must have negative numbers alone; "
            "convert the model again"
        )
    values = tensor_layout.from_stored(values[tensor_layout.own_rows(location)], location)
    return tensor_layout.read_in_order(location, slice(None), values.__getitem__)


def _read_blocks(
    raw: UInt8[np.ndarray, "bytes"],
    kind: GGMLQuantizationType,
    location: parameter_names.Location,
    rows: slice,
) -> UInt8[np.ndarray, "rows row_bytes"]:
    """Return some rows of a tensor in the blocks of the file."""
    count, width = location.rows
    first = location.before + (location.expert * count if location.merged else 0)
    inputs, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, width // inputs * block_bytes)[first : first + count]
    return tensor_layout.from_stored(
        tensor_layout.read_in_order(location, rows, blocks.__getitem__), location
    )
