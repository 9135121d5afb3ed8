"""Checkpoints of a run, one atomically written folder per step; only the last ones are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_flatten_with_path

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.fields import dotted, nested
from specjax.loading.compare_arrays import compare_arrays, leaf_name
from specjax.loading.storage import orbax_checkpoint
from specjax.loading.storage.orbax_saver import Saver
from train.run.workdir import STEPS, Workdir, unwritable

KEPT = 2
"""The number of checkpoints that are kept."""

_KIND = "drafter"


class Saved(NamedTuple):
    """A checkpoint found on disk: its step, and its metadata.

    `damaged` are the later steps whose checkpoints cannot be read.
    """

    step: int
    metadata: dict[str, Any]
    found: orbax_checkpoint.Found
    damaged: tuple[int, ...] = ()


def last_checkpoint(workdir: Workdir) -> Saved | None:
    """Return the newest intact checkpoint of a run, or None if nothing was saved yet.

    Saves that were interrupted do not count. Raises InputError if all saved checkpoints are
    damaged.
    """
    # One process looks, since file systems may show the others an older listing.
    steps = workdir.steps if processes.is_first() else []
    damaged: list[int] = []
    first_error = None
    for step in reversed(processes.from_first(steps)):
        folder = STEPS.path(workdir.checkpoints, step)
        try:
            found = processes.together(lambda path=folder: orbax_checkpoint.look(path, _KIND))
            orbax_checkpoint.verify(found)
            return Saved(step, found.metadata, found, tuple(damaged))
        except InputError as error:
            damaged.append(step)
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return None


def saver(workdir: Workdir, step: int) -> Saver:
    """Return the saver of a run that continues after `step`.

    It saves states as nested dicts, as `as_dict` returns them. Checkpoints of later steps are
    damaged, since otherwise the run would continue from them; they are kept under another name.
    Raises InputError if they cannot be renamed.
    """

    def set_damaged_aside() -> None:
        later = [number for number in workdir.steps if number > step]
        try:
            for path in (STEPS.path(workdir.checkpoints, number) for number in later):
                path.rename(path.with_name(f"damaged-{path.name}"))
        except OSError as error:
            raise unwritable(workdir.checkpoints, error) from None

    processes.together(lambda: set_damaged_aside() if processes.is_first() else None)
    return Saver(workdir.checkpoints, _KIND, STEPS, KEPT)


def restore(saved: Saved, state: Any) -> Any:
    """Return the saved arrays in the tree of `state`, with its shapes, dtypes and shardings.

    The leaves of `state` are arrays, or ShapeDtypeStructs with shardings. Raises InputError if the
    checkpoint has another structure.
    """
    wanted = as_dict(jax.tree.map(_described, state))
    compare_arrays(saved.found.directory, saved.found.arrays, wanted, "use another workdir")
    arrays = dotted(orbax_checkpoint.restore(saved.found, wanted))
    paths, tree = tree_flatten_with_path(state)
    return jax.tree.unflatten(tree, [arrays[leaf_name(path)] for path, _ in paths])


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def as_dict(tree: Any) -> dict[str, Any]:
    """Return a tree as nested dicts of arrays, without nodes that have no array."""
    leaves, _ = tree_flatten_with_path(tree)
    return nested({leaf_name(path): leaf for path, leaf in leaves})
