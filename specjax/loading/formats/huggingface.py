"""Checkpoints in Hugging Face's directory layout, read and written without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax.errors import InputError
from specjax.files import folder_checksums, folders
from specjax.loading.formats import (
    build_parameters,
    merged_experts,
    mtp_layers,
    mxfp4,
    parameter_names,
    safetensors_files,
    tensor_layout,
)
from specjax.loading.formats.families import registry
from specjax.loading.formats.family import Family
from specjax.loading.formats.huggingface_config import text_part, write_config
from specjax.loading.formats.safetensors_files import (
    FLOATS,
    WEIGHTS,
    StoredTensor,
    is_ours,
    read_notes,
    tensor_reader,
    write_tensors,
)
from specjax.loading.tokenizers.huggingface_tokenizer import write_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.loading.user_messages import note
from specjax.models.config import DecoderConfig
from specjax.models.mtp import MtpConfig

_READ_IF_THERE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files that affect a model's output, but may be missing."""


def read_headers(directory: Path, family: Family) -> dict[str, StoredTensor]:
    """Return a directory's tensors, without their values, by their names in `family.tensors`.

    The tensors are those in model.safetensors or its shards; of a multimodal model only those of
    its text part, and a line is logged that counts the others. Prefixes that other tools add or
    omit ("model.", "module.") are normalized. Raises InputError for missing shards, damaged files,
    pickles, and a directory that changed since `save` wrote it.
    """
    shards = safetensors_files.find_shards(directory)
    read = [*(path.name for path in shards), "config.json"]
    read += [name for name in _READ_IF_THERE if (directory / name).exists()]
    ours = any(is_ours(read_notes(path)) for path in shards)
    folder_checksums.verify(directory, ("model",), ours, read)
    stored = safetensors_files.read_headers(shards, (*FLOATS, *[mxfp4.BYTES] * family.mxfp4))
    if family.mxfp4:
        stored = mxfp4.with_kernels(str(directory), stored)
        if count := sum(tensor.dtype == mxfp4.KIND for tensor in stored):
            note(
                f"{directory}: the kernels of experts are in MXFP4 ({count} tensors) and are "
                "dequantised; weights=int4 keeps kernels in 4 bits"
            )
    if (part := text_part(directory)) is not None:
        whole, stored = stored, [tensor for tensor in stored if not part.skips(tensor.name)]
        note(
            f"{directory}: the text part of a model of model_type={part.model_type!r}, without the "
            f"{len(whole) - len(stored)} tensors of its other parts"
        )
    modules = "" if family.mtp is None else family.mtp.prefix + family.mtp.layer
    names = parameter_names.canonical(family.tensors, [tensor.name for tensor in stored], modules)
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = names[tensor.name]
        if name in tensors:
            raise InputError(
                f"{directory}: {tensor.name} and {tensors[name].name} have the same meaning; "
                "delete one of them"
            )
        tensors[name] = tensor
    return merged_experts.with_each_expert(family.tensors, tensors)


def read_params(
    directory: Path,
    stored: dict[str, StoredTensor],
    config: DecoderConfig,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    mtp: MtpConfig | None = None,
    bits: Mapping[parameter_names.Path, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the parameters of a decoder and, under "mtp", of its MTP modules, if any.

    `stored` is the result of `read_headers` for `directory`; kernels at the paths in `bits` are
    rounded on the devices (`build_parameters.build`). Raises InputError for tensors that are
    missing, unexpected or mis-shaped.
    """
    family = registry.family(config.family)
    head, embedding = (_output_name(family, tied=tied) for tied in (False, True))
    tensors = dict(stored)
    copies = mtp_layers.copies(config, mtp, family.mtp)
    if config.tie_word_embeddings and head in tensors:
        if embedding in tensors:
            copies[head] = embedding
        else:
            # Safetensors stores one of the tensors that share memory; it may be the head.
            tensors[embedding] = tensors.pop(head)
    copies = {name: original for name, original in copies.items() if name in tensors}
    ignored = [name for name in tensors if family.ignored and re.fullmatch(family.ignored, name)]
    modules = mtp_layers.locations(config, mtp, family.mtp, family.tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    locations = parameter_names.match(
        str(directory), family.tensors, config, shapes, others=modules, ignored=[*copies, *ignored]
    )
    # In the order of the shards, so that each is opened once.
    locations.sort(key=lambda location: str(tensors[location.name].path))
    read = mxfp4.reader(tensor_reader())
    for name, original in copies.items():
        # A tied head is stored as the embedding.
        original = original if original in tensors else embedding
        why = _UNTIE if name == head else "modules of this kind share it"
        both = read(tensors[name]), read(tensors[original])
        if not tensor_layout.same_numbers(*both, config.vocab_size):
            raise InputError(f"{directory}: {name} differs from {original}; {why}")

    def read_rows(location: parameter_names.Location, rows: slice, inputs: slice) -> np.ndarray:
        index = tensor_layout.own_rows(location, rows, inputs)
        return tensor_layout.from_stored(read(tensors[location.name], index), location)

    return build_parameters.build(
        *(config, mtp, dtype, [*locations, *modules], read_rows, mesh, shards, scan_layers),
        bits=bits,
    )


def read_padding(
    stored: dict[str, StoredTensor], config: DecoderConfig, dtype: np.dtype
) -> np.ndarray | None:
    """Return the rows of the embedding after those of the vocabulary, or None if there are none.

    `stored` is the result of `read_headers`, and has the parameters of a model with this `config`.
    """
    family = registry.family(config.family)
    names = (_output_name(family, tied=tied) for tied in (True, False))
    table = next(stored[name] for name in names if name in stored)
    if table.shape[0] <= config.vocab_size:
        return None
    return tensor_reader()(table, (slice(config.vocab_size, None), slice(None))).astype(dtype)


def _output_name(family: Family, *, tied: bool) -> str:
    """Return the name of the output head's tensor; that of the embedding if they are tied."""
    return next(
        slot.name for slot in family.tensors if slot.path[0] == "head" and slot.tied == tied
    )


_UNTIE = "tie_word_embeddings is true: set it to false in config.json"


def save(
    directory: Path,
    config: DecoderConfig,
    params: dict[str, Any],
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
    dtype: np.dtype,
) -> None:
    """Write a model directory that `load_model` and transformers read, atomically.

    `ends` are the ids that end a sequence. An earlier save is replaced. Raises InputError if
    `directory` holds anything else.
    """
    with folders.replacing(directory, "model") as new:
        write_config(config, tokenizer, ends, dtype, new)
        table = registry.tensors(config)
        write_tensors(tensor_layout.stored_tensors(table, config, params), new / WEIGHTS, {})
        if tokenizer is not None:
            write_tokenizer(tokenizer, new, config.max_positions)
