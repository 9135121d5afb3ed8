"""Checkpoints of models (with config and tokenizer) and of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.fields import Flag, Instance
from specjax.files.path_checks import output_folder, user_path
from specjax.loading import dataclass_json
from specjax.loading.compare_arrays import compare_arrays
from specjax.loading.formats import build_parameters
from specjax.loading.layer_layout import split_layers, stack_layers
from specjax.loading.model import MESH_KIND, MODEL_KIND, Model, array_table, split_arrays
from specjax.loading.quantize import float_model
from specjax.loading.storage import orbax_checkpoint, safetensors_checkpoint
from specjax.loading.storage.checkpoint_directory import ARRAYS, TOKENIZER
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer, write_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import with_joined
from specjax.models.mtp import MtpConfig, MtpModules
from specjax.models.parameters import cast

_REMEDY = "take both from one model"


@dataclass(frozen=True)
class _Metadata:
    """The metadata of a saved model; `dtype` and `scan_layers` describe its arrays."""

    config: DecoderConfig
    dtype: Literal["float32", "bfloat16", "float16"]
    scan_layers: bool
    mtp: MtpConfig | None
    ends: tuple[int, ...]

    @property
    def table(self) -> dict[str, Any]:
        """The parameters in the checkpoint, MTP modules included."""
        return array_table(self.config, self.mtp, self.scan_layers)

    def joined(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's arrays in the current layout, joining kernels saved in parts."""
        return with_joined(arrays, self.table, self.config)

    def in_parts(self, arrays: dict[str, Any]) -> bool:
        """Return whether the arrays were saved in parts that must be joined."""
        return jax.tree.structure(arrays) != jax.tree.structure(self.table)


def save_checkpoint(model: Model, directory: str | Path, *, overwrite: bool = False) -> None:
    """Write a model, its tokenizer and its MTP modules to `directory`, for `load_model`.

    The directory is written atomically, and every process must call this. Raises InputError,
    leaving the directory unchanged, if it has a checkpoint already (unless `overwrite`) or other
    files, or cannot be written.
    """
    MODEL_KIND.check("model", model)
    path = _writable(directory, overwrite)
    model = float_model(model)
    dtype, scan_layers = np.dtype(model.dtype), model.form.stacked
    modules = model.mtp and model.mtp.config
    wanted = _arrays(model.config, modules, dtype, scan_layers)
    compare_arrays(path, model.arrays, wanted, _REMEDY)
    metadata = _Metadata(model.config, dtype.name, scan_layers, modules, model.stated_ends)

    def write_more(new: Path) -> None:
        if model.tokenizer is not None:
            (new / TOKENIZER).mkdir()
            write_tokenizer(model.tokenizer, new / TOKENIZER)

    orbax_checkpoint.save(path, model.arrays, asdict(metadata), overwrite, write_more)


def read_model(
    directory: Path,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    stacks: Callable[[DecoderConfig], bool] = lambda config: True,
    tell_narrow: Callable[[DecoderConfig, MtpConfig | None], None] = lambda config, mtp: None,
    check_memory: Callable[[DecoderConfig, MtpConfig | None], None] = lambda config, mtp: None,
) -> tuple[DecoderConfig, Tokenizer | None, tuple[int, ...], dict[str, Any], MtpModules | None]:
    """Return the config, tokenizer, `stated_ends`, parameters and MTP modules of a saved model.

    Every process must call it; each device reads only its part of each array. `stacks` decides from
    the config whether layers are stacked, however they were saved; `tell_narrow` is called before
    arrays saved in 16 bits are read, and `check_memory` before any are. Raises InputError, before
    reading arrays, for a checkpoint that is damaged, not a model's, or inconsistent with its
    config, and for a mesh that does not fit the model.
    """
    path = user_path("directory", directory)

    def look() -> tuple[orbax_checkpoint.Found, _Metadata, Tokenizer | None]:
        checkpoint, saved, tokenizer = _look_at_model(path)
        if mesh is not None:
            build_parameters.check_shards(saved.config, shards)
            if saved.in_parts(checkpoint.arrays):
                raise InputError(
                    f"{path}: saved when queries, keys and values were kernels of their own; load "
                    "it without a mesh, and save it again"
                )
        stacks(saved.config)
        return checkpoint, saved, tokenizer

    checkpoint, saved, tokenizer = processes.together(look)
    config = saved.config
    if saved.dtype != "float32":
        tell_narrow(config, saved.mtp)
    check_memory(config, saved.mtp)
    orbax_checkpoint.verify(checkpoint)
    placed = _placed_arrays(config, saved.mtp, dtype, mesh, shards, saved.scan_layers)
    if saved.in_parts(checkpoint.arrays):
        placed = jax.tree.map(lambda leaf: _placed(leaf, _default_device()), checkpoint.arrays)
    arrays = saved.joined(orbax_checkpoint.restore(checkpoint, placed))
    params, mtp = split_arrays(cast(arrays, saved.table, dtype), saved.mtp)
    scan_layers = stacks(config)
    if saved.scan_layers != scan_layers:
        wanted = _placed_arrays(config, None, dtype, mesh, shards, scan_layers)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        restack = split_layers if saved.scan_layers else stack_layers
        params = restack(params, shardings, config)
    return config, tokenizer, saved.ends, params, mtp


def save_drafter(
    directory: str | Path,
    params: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write a drafter's nested dict of arrays and its JSON metadata to `directory`.

    The arrays are in a safetensors file. `load_drafter` reads them. Every process must call it.
    Raises InputError as `save_checkpoint` does, and for names with dots, leaves that are not
    numeric arrays, and metadata that is not JSON.
    """
    path = _writable(directory, overwrite)
    for name, value in (("params", params), ("metadata", metadata)):
        Instance(Mapping, "use a dict").check(name, value)
    safetensors_checkpoint.save(path, dict(params), dict(metadata), overwrite)


def load_drafter(
    directory: str | Path, mesh: Mesh | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays and metadata that `save_drafter` wrote.

    The arrays may also be Orbax's, as earlier versions saved them. On a mesh they are replicated.
    Every process must call it. Tuples in the metadata become lists. Raises InputError for a
    directory that is not an intact checkpoint of a drafter.
    """
    MESH_KIND.check("mesh", mesh)
    path = user_path("directory", directory)
    sharding = _default_device() if mesh is None else NamedSharding(mesh, PartitionSpec())
    if not processes.from_first((path / ARRAYS).is_dir()):
        return safetensors_checkpoint.load(path, sharding)
    checkpoint = processes.together(lambda: orbax_checkpoint.look(path, "drafter"))
    orbax_checkpoint.verify(checkpoint)
    placed = jax.tree.map(lambda leaf: _placed(leaf, sharding), checkpoint.arrays)
    return orbax_checkpoint.restore(checkpoint, placed), checkpoint.metadata


def _look_at_model(path: Path) -> tuple[orbax_checkpoint.Found, _Metadata, Tokenizer | None]:
    """Return a checkpoint's index, metadata and tokenizer, after checking that they agree."""
    checkpoint = orbax_checkpoint.look(path, "model")
    saved = dataclass_json.read_dataclass("metadata", _Metadata, checkpoint.metadata)
    config, tokenizer = saved.config, read_tokenizer(path / TOKENIZER)
    if tokenizer is not None:
        tokenizer = tokenizer.limited(config.vocab_size, "vocab_size")
    # Each separate layer has an entry in the table, so their number must be bounded first.
    if not saved.scan_layers and config.num_layers > len(jax.tree.leaves(checkpoint.arrays)):
        raise InputError(
            f"{path}: the config asks for {config.num_layers} layers, which are not there; "
            "take parameters and config from one model"
        )
    if saved.mtp is not None:
        saved.mtp.check_target(config)
    stored = np.dtype(jnp.dtype(saved.dtype))
    wanted = _arrays(config, saved.mtp, stored, saved.scan_layers)
    compare_arrays(path, jax.eval_shape(saved.joined, checkpoint.arrays), wanted, _REMEDY)
    return checkpoint, saved, tokenizer


def _writable(directory: str | Path, overwrite: bool) -> Path:
    Flag().check("overwrite", overwrite)
    return output_folder("directory", directory)


def _arrays(
    config: DecoderConfig, mtp: MtpConfig | None, dtype: np.dtype, scan_layers: bool
) -> dict[str, Any]:
    """Return the shapes and dtypes of a model's arrays."""
    return jax.tree.map(
        lambda entry: jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype)),
        array_table(config, mtp, scan_layers),
    )


def _placed_arrays(
    config: DecoderConfig,
    mtp: MtpConfig | None,
    dtype: np.dtype,
    mesh: Mesh | None,
    shards: int,
    scan_layers: bool,
) -> dict[str, Any]:
    """Return the shapes, dtypes and shardings of a model's arrays."""
    arrays = _arrays(config, mtp, dtype, scan_layers)
    if mesh is None:
        return jax.tree.map(lambda leaf: _placed(leaf, _default_device()), arrays)
    table = array_table(config, mtp, scan_layers)
    return jax.tree.map(_placed, arrays, build_parameters.table_shardings(table, mesh, shards))


def _default_device() -> Sharding:
    return jnp.zeros(()).sharding


def _placed(leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
