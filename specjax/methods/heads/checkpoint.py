"""The directory of a head in another tool's layout: config.json and safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.compare_arrays import differences, in_words
from specjax.loading.formats.safetensors_files import (
    FLOATS,
    WEIGHTS,
    StoredTensor,
    find_shards,
    is_ours,
    read_headers,
    read_notes,
    tensor_reader,
)
from specjax.loading.tokenizers.huggingface_tokenizer import read_json

CONFIG, MEDUSA_WEIGHTS = "config.json", "medusa_lm_head.safetensors"
_WRAPPERS = re.compile(r"^((model|module|_orig_mod|draft_model|eagle_module)\.)+")
"""Matches the names of wrapping modules, which tools prefix to the names of a head's tensors."""

_MAPS = ("BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")
"""The types of tensors that map draft vocabularies to tokens."""


@dataclass(frozen=True)
class Checkpoint:
    """The config of a head's directory, its tensors by name, and the metadata in their header."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(repr=False)
    notes: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_ours(self) -> bool:
        """Whether specjax wrote the checkpoint."""
        return is_ours(self.notes)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return the config and all tensors of a directory.

    Raises InputError for pickles, damaged files, non-finite numbers, a missing config, and a
    directory that changed since specjax wrote it.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; download the head and give its folder")
    config, stored = read_json(directory / CONFIG), _find_tensors(directory)
    files = dict.fromkeys(tensor.path for tensor in stored.values())
    if not config:
        raise InputError(f"{directory}: no {CONFIG}; download it beside its weights")
    numbers = tensor_reader()
    tensors = {name: numbers(tensor) for name, tensor in stored.items()}
    notes = {key: text for path in files for key, text in read_notes(path).items()}
    checkpoint = Checkpoint(directory, _with_layers_fields(config), tensors, notes)
    read = [CONFIG, *(path.name for path in files)]
    folder_checksums.verify(directory, ("head",), checkpoint.is_ours, read)
    for name, tensor in tensors.items():
        if tensor.dtype.kind not in "iub" and not np.isfinite(tensor.astype(np.float32)).all():
            raise InputError(
                f"{directory}: {name} holds numbers that are not finite; download it again"
            )
    return checkpoint


def _with_layers_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` plus the fields in its section "model", where vLLM's EAGLEConfig has them."""
    inner = config.get("model")
    if config.get("model_type") != "eagle" or not isinstance(inner, dict):
        return config
    outer = {name: value for name, value in config.items() if name not in ("model", "model_type")}
    return {**inner, **outer}


def tensor_names(directory: Path) -> set[str]:
    """Return the names of a directory's tensors, as `read_checkpoint` returns them."""
    return set(_find_tensors(directory))


def _find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a directory by name, without prefixes of modules around the head."""
    shards = find_shards(directory, (WEIGHTS, MEDUSA_WEIGHTS))
    tensor_of: dict[str, StoredTensor] = {}
    for tensor in read_headers(shards, (*FLOATS, *_MAPS)):
        name = _WRAPPERS.sub("", tensor.name)
        if name in tensor_of:
            raise InputError(
                f"{tensor.path}: {tensor.name} is there twice, once without its prefix; delete one"
            )
        tensor_of[name] = tensor
    return tensor_of


def match(
    where: Path,
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Raise InputError listing tensors that are missing, unexpected, mis-shaped or not floats.

    `found` are the tensors of the directory `where`, and `wanted` the shapes that they must have,
    by name. `optional` names may be present with any shape and type.
    """
    shapes = {name: tensor.shape for name, tensor in found.items()}
    problems = differences(shapes, wanted, optional)
    problems["of another type than floats"] = [
        f"{name} ({found[name].dtype})"
        for name in wanted
        if name in found and found[name].dtype.kind in "iub"
    ]
    if listed := in_words(problems):
        raise InputError(
            f"{where}: the tensors do not fit the config ({listed}); "
            "download it again if it is cut off; otherwise it is in a layout that is not read, or "
            "config.json is another head's"
        )
