"""Checkpoints in Hugging Face's directory layout, read and written without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.errors import InputError, one_line, shown
from specjax.files import folder_marker, folders
from specjax.files.open_files import regular_file
from specjax.loading.formats import build_parameters, mtp_layers, parameter_names, tensor_layout
from specjax.loading.formats.families import registry
from specjax.loading.formats.family import Family
from specjax.loading.formats.huggingface_config import write_config
from specjax.loading.tokenizers.huggingface_tokenizer import read_json, write_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that run code when they are read."""

_READ_IF_THERE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Files that change what a model says."""

BUFFERS = re.compile(r".*\.rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")
"""Names of buffers that old checkpoints kept."""

_FLOATS = ("F32", "F16", "BF16", "F64")
PRODUCER = {"format": "pt", "producer": "specjax"}
"""The header of the safetensors files that specjax writes."""


def refuse_pickle(path: Path, directory: Path) -> InputError:
    """The error for weights in a pickle, with the command that converts them."""
    return InputError(
        f"{path}: a pickle can run code and is not read; convert it where torch is installed: "
        'python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\""
    )


def _find_shards(directory: Path) -> dict[Path, list[str] | None]:
    """The weight files of a directory, each with the tensors the index puts there, if it does."""
    index = directory / _INDEX
    if (directory / _WEIGHTS).exists():
        return {directory / _WEIGHTS: None}
    if not index.exists():
        pickles = [path for path in sorted(directory.iterdir()) if path.suffix in PICKLES]
        if pickles:
            raise refuse_pickle(pickles[0], directory)
        raise InputError(
            f"{directory}: no weights; it needs {_WEIGHTS} or {_INDEX} with its shards"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map must name a file for each tensor; download it again")
    shards: dict[Path, list[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{index}: {shown(tensor)} is in {shown(name)}, which is not a plain file name"
            )
        names = shards.setdefault(directory / name, [])
        assert names is not None
        names.append(tensor)
    missing = [path.name for path in shards if not path.exists()]
    if missing:
        raise InputError(
            f"{directory}: missing shard {', '.join(sorted(missing))}; download it again"
        )
    return shards


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(regular_file(path, "download it again"), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path}: not a safetensors file ({one_line(error)}); download it again"
        ) from None
    with file:
        yield file


class StoredTensor(NamedTuple):
    """A tensor in a file: its file, its name there, its shape and type."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Stored:
    """What the weight files of a directory hold, by the names of the family's table."""

    directory: Path
    tensors: dict[str, StoredTensor]

    @property
    def is_narrow(self) -> bool:
        """Whether some numbers are stored in 16 bits."""
        return any(tensor.dtype in ("F16", "BF16") for tensor in self.tensors.values())


def read_headers(directory: Path, family: Family) -> Stored:
    """The tensors of model.safetensors or its shards, whose numbers are not read yet.

    Tools put names in front of the family's, or leave its first part out: both are undone. Raises
    InputError for missing shards, damaged files, pickles, and a directory that is not what `save`
    wrote there.
    """
    shards = _find_shards(directory)
    read = [*(path.name for path in shards), "config.json"]
    read += [name for name in _READ_IF_THERE if (directory / name).exists()]
    folder_marker.verify(directory, ("model",), any(map(is_ours, shards)), read)
    found = [
        tensor
        for path, listed in shards.items()
        for tensor in _read_header(path, listed)
        if not BUFFERS.fullmatch(tensor.name)
    ]
    for path, name, _, dtype in found:
        if dtype not in _FLOATS:
            raise InputError(
                f"{path}: {name} has the type {dtype}, which is not supported; use a checkpoint "
                f"in {', '.join(_FLOATS)}"
            )
    names = parameter_names.canonical(family.tensors, [tensor.name for tensor in found])
    tensors: dict[str, StoredTensor] = {}
    for tensor in found:
        name = names[tensor.name]
        if name in tensors:
            raise InputError(
                f"{directory}: {tensor.name} and {tensors[name].name} have the same meaning; "
                "delete one of them"
            )
        tensors[name] = tensor
    return Stored(directory, tensors)


def _read_header(path: Path, listed: list[str] | None) -> Iterator[StoredTensor]:
    """A file's tensors, after comparing them with those that the index puts there."""
    with _open_shard(path) as file:
        present = set(file.keys())
        lacking = sorted(set(listed or ()) - present)
        if lacking:
            raise InputError(
                f"{path}: lacks {lacking[0]}, which the index puts there "
                f"({len(lacking)} tensors in all); download it again"
            )
        for name in present if listed is None else listed:
            entry = file.get_slice(name)
            yield StoredTensor(path, name, tuple(entry.get_shape()), entry.get_dtype())


def read_params(
    stored: Stored,
    config: DecoderConfig,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    mtp: MtpConfig | None = None,
) -> dict[str, Any]:
    """The parameter tree of `parameter_names.param_shapes`, from the files of a directory.

    With the modules `mtp` theirs are under "mtp". Raises InputError for tensors that are missing,
    unexpected or mis-shaped.
    """
    family, directory = registry.family(config.family), stored.directory
    head, embedding = (
        next(slot.name for slot in family.tensors if slot.path[0] == path and slot.tied == tied)
        for path, tied in (("head", False), ("head", True))
    )
    tensors = dict(stored.tensors)
    copies = mtp_layers.copies(config, mtp, family.mtp)
    if config.tie_word_embeddings and head in tensors:
        if embedding in tensors:
            copies[head] = embedding
        else:
            # Of tensors that share their memory, safetensors stores one, which may be the head.
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
    with ExitStack() as stack:
        paths = {tensor.path for tensor in tensors.values()}
        files = {path: stack.enter_context(_open_shard(path)) for path in paths}

        def read(name: str) -> np.ndarray:
            return files[tensors[name].path].get_tensor(tensors[name].name)

        for name, original in copies.items():
            # A tied head is stored as the embedding.
            original = original if original in tensors else embedding
            why = _UNTIE if name == head else "modules of this kind share it"
            if not tensor_layout.same_numbers(read(name), read(original), config.vocab_size):
                raise InputError(f"{directory}: {name} differs from {original}; {why}")

        def fill(location: parameter_names.Location, target: np.ndarray) -> None:
            rows = read(location.name)[: location.stored_shape[0]]
            target[...] = tensor_layout.from_stored(rows, location).astype(target.dtype)

        params = build_parameters.build(
            config, dtype, locations, fill, mesh, shards, scan_layers, threads=1
        )
        if mtp is not None:
            params["mtp"] = mtp_layers.build(mtp, dtype, modules, fill, mesh, shards)
        return params


_UNTIE = "tie_word_embeddings is true: set it to false in config.json"


def write_params(params: dict[str, Any], config: DecoderConfig, path: Path) -> None:
    """Write the parameter tree as one safetensors file, in the names and axes of transformers."""
    table = registry.family(config.family).tensors
    write_tensors(tensor_layout.stored_tensors(table, config, params), path, {})


def write_tensors(tensors: Mapping[str, np.ndarray], path: Path, notes: Mapping[str, str]) -> None:
    """Write a safetensors file whose header names specjax beside the notes; raises OSError."""
    try:
        save_file(dict(tensors), path, metadata={**notes, **PRODUCER})
    except SafetensorError as error:
        raise OSError(one_line(error)) from None


def is_ours(path: Path) -> bool:
    """Whether the header of a safetensors file says that specjax wrote it."""
    with _open_shard(path) as file:
        return (file.metadata() or {}).get("producer") == PRODUCER["producer"]


def save(
    directory: Path,
    config: DecoderConfig,
    params: dict[str, Any],
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
    dtype: np.dtype,
) -> None:
    """Write a model directory that `load_model` and transformers read, whole or not at all.

    `ends` are the ids that end a sequence. An earlier save is replaced. Raises InputError where
    `directory` holds anything else.
    """

    def write(part: Path) -> None:
        write_config(config, tokenizer, ends, dtype, part)
        write_params(params, config, part / _WEIGHTS)
        if tokenizer is not None:
            write_tokenizer(tokenizer, part, config.max_positions)

    folders.write_folder(directory, "model", write)
