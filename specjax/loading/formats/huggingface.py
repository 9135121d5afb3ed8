"""Checkpoints in Hugging Face's directory layout, read and written without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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

_OF_MTP = re.compile(
    r"(model\.)?mtp(_layers)?\.|model\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\."
)
"""Names of tensors of DeepSeek's, GLM's, MiMo's, Qwen's and Step's MTP layers."""

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


def _read_headers(shards: dict[Path, list[str] | None]) -> tuple[dict[str, Path], dict[str, Any]]:
    """Where each tensor is, and its shape; the files are checked against the index."""
    where: dict[str, Path] = {}
    shapes: dict[str, Any] = {}
    for path, listed in shards.items():
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
                if name.endswith(".rotary_emb.inv_freq"):  # a buffer that old checkpoints kept
                    continue
                if entry.get_dtype() not in _FLOATS:
                    raise InputError(
                        f"{path}: {name} has the type {entry.get_dtype()}, which is not "
                        f"supported; use a checkpoint in {', '.join(_FLOATS)}"
                    )
                where[name], shapes[name] = path, tuple(entry.get_shape())
    return where, shapes


def read_params(
    directory: Path,
    config: DecoderConfig,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    scan_layers: bool = True,
    mtp: MtpConfig | None = None,
) -> dict[str, Any]:
    """The parameter tree of `parameter_names.param_shapes`, from model.safetensors or its shards.

    With the modules `mtp` theirs are under "mtp". Raises InputError for missing shards, damaged
    files, pickles, tensors that are missing, unexpected or mis-shaped, and a directory that is not
    what `save` wrote there.
    """
    shards_found = _find_shards(directory)
    read = [*(path.name for path in shards_found), "config.json"]
    read += [name for name in _READ_IF_THERE if (directory / name).exists()]
    folder_marker.verify(directory, ("model",), any(map(is_ours, shards_found)), read)
    where, shapes = _read_headers(shards_found)
    if mtp is None:
        _check_mtp(directory, where)
    family = registry.family(config.family)
    stored = _stored_names(family, where)
    table = [slot._replace(name=stored(slot.name)) for slot in family.tensors]
    head, embedding = (
        next(
            stored(slot.name)
            for slot in family.tensors
            if slot.path[0] == path and slot.tied == tied
        )
        for path, tied in (("head", False), ("head", True))
    )
    tied_copy = config.tie_word_embeddings and head in where
    ignored = [name for name in where if family.ignored and re.fullmatch(family.ignored, name)]
    modules = mtp_layers.locations(config, mtp, family.mtp, family.tensors)
    copies = {
        name: of for name, of in mtp_layers.copies(config, mtp, family.mtp).items() if name in where
    }
    ignored += [*copies, *([head] if tied_copy else [])]
    locations = parameter_names.match(
        str(directory), table, config, shapes, others=modules, ignored=ignored
    )
    if tied_copy:
        _check_equal(directory, where, head, embedding, _UNTIE)
    for name, original in copies.items():
        # A tied head is stored as the embedding.
        original = original if original in where else embedding
        _check_equal(directory, where, name, original, "modules of this kind share it")
    # In the order of the shards, so that each is opened once.
    locations.sort(key=lambda location: str(where[location.name]))
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open_shard(path)) for path in set(where.values())}

        def fill(location: parameter_names.Location, target: np.ndarray) -> None:
            stored = files[where[location.name]].get_tensor(location.name)[
                : location.stored_shape[0]
            ]
            target[...] = tensor_layout.from_stored(stored, location).astype(target.dtype)

        params = build_parameters.build(
            config, dtype, locations, fill, mesh, shards, scan_layers, threads=1
        )
        if mtp is not None:
            params["mtp"] = mtp_layers.build(mtp, dtype, modules, fill, mesh, shards)
        return params


def _check_mtp(directory: Path, names: Iterable[str]) -> None:
    """Raise InputError where a checkpoint holds layers for multi-token prediction."""
    found = [name for name in sorted(names) if _OF_MTP.match(name)]
    if found:
        raise InputError(
            f"{directory}: {found[0]} belongs to an MTP layer ({len(found)} tensors in all), which "
            "config.json does not announce; set num_nextn_predict_layers there, or delete its "
            "tensors to use the model without"
        )


def _stored_names(family: Family, names: Collection[str]) -> Callable[[str], str]:
    """How a checkpoint spells the family's names: with the optional prefix or without."""
    prefix = family.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in names):
        return lambda name: name
    return lambda name: name.removeprefix(prefix)


_UNTIE = "tie_word_embeddings is true: set it to false in config.json"


def _check_equal(
    directory: Path, where: dict[str, Path], copy: str, original: str, why: str
) -> None:
    """Raise InputError where a tensor is not the one that it ought to repeat; `why` it ought to."""
    both = []
    for name in (copy, original):
        with _open_shard(where[name]) as file:
            both.append(file.get_tensor(name))
    if not np.array_equal(*both):
        raise InputError(f"{directory}: {copy} differs from {original}; {why}")


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
