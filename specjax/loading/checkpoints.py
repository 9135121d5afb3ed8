"""Checkpoints of models (with config and tokenizer) and of drafters: save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specjax.distributed import processes
from specjax.distributed.sharding import MESH_KIND
from specjax.errors import InputError
from specjax.fields import Flag, Instance
from specjax.files.paths import output_folder, user_path
from specjax.loading import model_metadata, orbax_checkpoint
from specjax.loading.formats import build_parameters
from specjax.loading.layer_layout import split_layers, stack_layers
from specjax.loading.model import MODEL_KIND, Model, array_table, split_arrays
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.loading.weights import float_model
from specjax.models.config import DecoderConfig
from specjax.models.heads.mtp import MtpConfig, MtpModules

_DTYPES = ("float32", "bfloat16", "float16")
_MODEL_METADATA = {
    "config": dict,
    "dtype": str,
    "scan_layers": bool,
    "tokenizer": dict | None,
    "mtp": dict | None,
    "ends": list[int],
}


def save_checkpoint(model: Model, directory: str | Path, *, overwrite: bool = False) -> None:
    """Write a model, its tokenizer and its MTP modules, whole or not at all, for `load_model`.

    Every process makes the call. Raises InputError where the directory holds a checkpoint already
    (unless `overwrite`) or anything else, or cannot be written; it is then unchanged.
    """
    MODEL_KIND.check("model", model)
    path = _writable(directory, overwrite)
    model = float_model(model)
    dtype, scan_layers = np.dtype(model.dtype), model.form.stacked
    modules = model.mtp and model.mtp.config
    wanted = _arrays(model.config, modules, dtype, scan_layers)
    compare_arrays(path, orbax_checkpoint.shapes(model.arrays), wanted)
    metadata = {
        "config": model_metadata.config_metadata(model.config),
        "dtype": dtype.name,
        "scan_layers": scan_layers,
        "tokenizer": model.tokenizer and model_metadata.tokenizer_metadata(model.tokenizer),
        "mtp": modules and model_metadata.head_metadata(modules),
        "ends": list(model.stated_ends),
    }
    orbax_checkpoint.save(path, "model", model.arrays, metadata, overwrite)


def read_model(
    directory: Path,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    shards: int = 1,
    stacks: Callable[[DecoderConfig], bool] = lambda config: True,
    tell_narrow: Callable[[DecoderConfig, MtpConfig | None], None] = lambda config, mtp: None,
) -> tuple[DecoderConfig, Tokenizer | None, tuple[int, ...], dict[str, Any], MtpModules | None]:
    """The parts of a saved model, each device reading its own part of each array.

    The third part are its `stated_ends`, the last its MTP modules. Every process makes the call.
    `stacks` says by the config whether layers are to be stacked, however they were saved;
    `tell_narrow` is called before arrays are read that were saved in 16 bits. Raises InputError for
    a checkpoint that is damaged, not a model's, or does not fit its config, for a mesh that does
    not fit the model, and where `stacks` does, before arrays are read.
    """
    path = user_path("directory", directory)

    def look() -> _Model:
        found = _look_at_model(path)
        if mesh is not None:
            build_parameters.check_shards(found.config, shards)
        stacks(found.config)
        return found

    found, config, tokenizer, modules = processes.together(look)
    if found.metadata["dtype"] != "float32":
        tell_narrow(config, modules)
    orbax_checkpoint.verify(found)
    stacked = found.metadata["scan_layers"]
    placed = _placed_arrays(config, modules, dtype, mesh, shards, stacked)
    params, mtp = split_arrays(orbax_checkpoint.restore(found, placed), modules)
    scan_layers = stacks(config)
    if stacked != scan_layers:
        wanted = _placed_arrays(config, None, dtype, mesh, shards, scan_layers)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        params = (split_layers if stacked else stack_layers)(params, shardings, config)
    return config, tokenizer, tuple(found.metadata.get("ends", ())), params, mtp


def save_drafter(
    directory: str | Path,
    params: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write a drafter's nested dict of arrays and JSON-ready metadata, for `load_drafter`.

    Every process makes the call. Raises InputError as `save_checkpoint` does, and for names with
    dots, leaves that are not arrays of numbers, and metadata that are not JSON.
    """
    path = _writable(directory, overwrite)
    for name, value in (("params", params), ("metadata", metadata)):
        Instance(Mapping, "use a dict").check(name, value)
    orbax_checkpoint.save(path, "drafter", dict(params), dict(metadata), overwrite)


def load_drafter(
    directory: str | Path, mesh: Mesh | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The params and metadata of `save_drafter`; on a mesh the arrays are whole on each device.

    Every process makes the call. Tuples in the metadata come back as lists. Raises InputError for a
    directory that is not an intact checkpoint of a drafter.
    """
    MESH_KIND.check("mesh", mesh)
    path = user_path("directory", directory)
    found = processes.together(lambda: orbax_checkpoint.look(path, "drafter"))
    orbax_checkpoint.verify(found)
    sharding = _default_device() if mesh is None else NamedSharding(mesh, PartitionSpec())
    return orbax_checkpoint.restore(found, _all_placed(found.arrays, sharding)), found.metadata


class _Model(NamedTuple):
    """A checkpoint's index, and what its metadata say."""

    found: orbax_checkpoint.Found
    config: DecoderConfig
    tokenizer: Tokenizer | None
    mtp: MtpConfig | None


def _look_at_model(path: Path) -> _Model:
    """A checkpoint's index, configs and tokenizer, checked against the arrays it lists."""
    found = orbax_checkpoint.look(path, "model")
    metadata = model_metadata.check_fields(
        "metadata", found.metadata, _MODEL_METADATA, ("mtp", "ends")
    )
    config, tokenizer = model_metadata.read_config(metadata["config"]), None
    if metadata["tokenizer"] is not None:
        tokenizer = model_metadata.read_tokenizer(metadata["tokenizer"])
        tokenizer = tokenizer.limited(config.vocab_size, "vocab_size")
    for end in metadata.get("ends", ()):
        if not 0 <= end < config.vocab_size:
            raise InputError(
                f"{path}: ends={end} is outside the vocabulary of {config.vocab_size} tokens; "
                "save the model again"
            )
    if metadata["dtype"] not in _DTYPES:
        raise InputError(
            f"{path}: dtype={metadata['dtype']!r:.40}: use a checkpoint in {', '.join(_DTYPES)}"
        )
    # Unstacked layers have an entry each, so that their number has to be bounded first.
    if not metadata["scan_layers"] and config.num_layers > len(jax.tree.leaves(found.arrays)):
        raise InputError(
            f"{path}: the config asks for {config.num_layers} layers, which are not there; "
            "take parameters and config from one model"
        )
    modules = metadata.get("mtp")
    if (modules is None) != ("mtp" not in found.arrays):
        announced = "holds arrays of" if modules is None else "lacks the arrays of"
        listed = "do not announce" if modules is None else "announce"
        raise InputError(
            f"{path}: the checkpoint {announced} MTP modules, which its metadata {listed}; save "
            "the model again"
        )
    if modules is not None:
        modules = model_metadata.read_head_config("mtp", MtpConfig, modules)
        # Each module has entries of its own, so that their number is bounded by what is there.
        if modules.num_modules > len(jax.tree.leaves(found.arrays)):
            raise InputError(
                f"{path}: mtp: num_modules={modules.num_modules}, which are not there; save the "
                "model again"
            )
        modules.check_target(config)
    stored = np.dtype(jnp.dtype(metadata["dtype"]))
    compare_arrays(path, found.arrays, _arrays(config, modules, stored, metadata["scan_layers"]))
    return _Model(found, config, tokenizer, modules)


def _writable(directory: str | Path, overwrite: bool) -> Path:
    Flag().check("overwrite", overwrite)
    return output_folder("directory", directory)


def _arrays(
    config: DecoderConfig, mtp: MtpConfig | None, dtype: np.dtype, scan_layers: bool
) -> dict[str, Any]:
    """The arrays of a model as shapes."""
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
    """Likewise, each with its sharding."""
    arrays = _arrays(config, mtp, dtype, scan_layers)
    if mesh is None:
        return _all_placed(arrays, _default_device())
    table = array_table(config, mtp, scan_layers)
    shardings = build_parameters.table_shardings(table, mesh, shards)
    return jax.tree.map(_placed, arrays, shardings)


def _default_device() -> Sharding:
    return jnp.zeros(()).sharding


def _placed(leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _all_placed(tree: Any, sharding: Sharding) -> Any:
    return jax.tree.map(lambda leaf: _placed(leaf, sharding), tree)


def compare_arrays(
    path: Path, found: Any, wanted: Any, remedy: str = "take both from one model"
) -> None:
    """Raise InputError listing the arrays that are missing, unexpected or of another shape."""
    have, want = _described(found), _described(wanted)
    problems = {
        "missing": [name for name in want if name not in have],
        "unexpected": [name for name in have if name not in want],
        "another shape": [
            f"{name} {have[name]}, not {want[name]}"
            for name in want
            if name in have and have[name] != want[name]
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{label}: {_some(names)}" for label, names in problems.items() if names)
        raise InputError(f"{path}: the parameters do not fit the config ({listed}); {remedy}")


def leaf_name(path: tuple) -> str:
    """A path in a tree of parameters as a dotted name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _described(tree: Any) -> dict[str, str]:
    return {
        leaf_name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
