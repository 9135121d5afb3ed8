"""Saving of heads as checkpoints, and their reading back as the methods that they are for say."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.errors import InputError
from specjax.loading import checkpoints
from specjax.loading.dataclass_json import read_dataclass
from specjax.methods.heads.compact import compact_arrays, float_params
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.registry import HEADS


@dataclass(frozen=True)
class _Metadata:
    """The metadata saved with a head's arrays; the type of `config` depends on the kind.

    `compact` says that the arrays are those of `heads.compact`.
    """

    kind: str
    config: dict
    target: TargetMetadata
    training: dict
    compact: bool = False

    def __post_init__(self) -> None:
        if self.kind not in HEADS:
            raise InputError(
                f"head: kind={self.kind!r:.40} is of no use; use a checkpoint as it was saved"
            )


def compacted(head: Head) -> Head:
    """Return the head that is read after `head` was saved with `compact`: rounded, in float32.

    Raises InputError as `compact_arrays` does.
    """
    table = head.config.parameter_table()
    return dataclasses.replace(
        head, params=float_params(table, compact_arrays("head", table, head.params))
    )


def save_head(
    head: Head, directory: str | Path, *, overwrite: bool = False, compact: bool = False
) -> None:
    """Write a head as a folder of safetensors and JSON, atomically.

    Every process must call it. `overwrite` replaces an earlier head in `directory`. With `compact`
    kernels and embeddings are rounded to 8 bits (`heads.compact`), a quarter of float32. Raises
    InputError as `checkpoints.save_drafter` does, and for numbers that do not fit.
    """
    params = dict(head.params)
    if compact:
        params = compact_arrays(str(directory), head.config.parameter_table(), params)
    if head.draft_ids is not None:
        params["draft_ids"] = np.asarray(head.draft_ids, np.int32)
    config = dataclasses.asdict(head.config)
    saved = _Metadata(head.kind, config, head.target, head.training, compact)
    metadata = dataclasses.asdict(saved)
    checkpoints.save_drafter(directory, params, metadata, overwrite=overwrite)


def read_head(directory: str | Path, mesh: Mesh | None = None) -> Head:
    """Return a head that `save_head` wrote; on a mesh its arrays are replicated.

    If they were saved with `compact`, they are in float32. Kernels that an earlier version saved in
    parts are joined (`joined_kernels.with_joined`). Every process must call it. Raises InputError
    for anything that is not an intact head.
    """
    params, metadata = checkpoints.load_drafter(directory, mesh)
    where = jax.tree.leaves(params)[0].sharding
    try:
        saved = read_dataclass("head", _Metadata, metadata)
        config = read_dataclass("config", HEADS[saved.kind], saved.config)
        ids = params.pop("draft_ids", None)
        ids = None if ids is None else np.asarray(ids)
        if saved.compact:
            params = jax.device_put(float_params(config.parameter_table(), params), where)
        else:
            params = config.joined(params)
        return Head(saved.kind, config, params, ids, saved.target, saved.training)
    except InputError as error:
        raise InputError(f"{directory}: {error}") from None
