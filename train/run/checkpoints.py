"""Checkpoints of a run: a directory per step, whole or not at all; the last two are kept."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_flatten_with_path

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.fields import dotted
from specjax.loading import checkpoint_directory, orbax_checkpoint
from specjax.loading.checkpoints import leaf_name
from train.run.workdir import Workdir, steps

KEPT = 2
"""How many checkpoints are kept."""

_KIND = "drafter"


class Saved(NamedTuple):
    """A checkpoint that was found: its step, and what was written beside its arrays.

    `damaged` are later steps whose checkpoints cannot be read.
    """

    step: int
    metadata: dict[str, Any]
    found: orbax_checkpoint.Found
    damaged: tuple[int, ...] = ()


def last_checkpoint(workdir: Workdir) -> Saved | None:
    """The newest checkpoint that is whole; None where nothing was saved yet.

    What an interrupted save left does not count. Raises InputError where all that were saved are
    damaged.
    """
    # One process looks, since file systems may show the others an older listing.
    finished = processes.from_first(_finished(workdir) if processes.is_first() else [])
    damaged: list[int] = []
    first = None
    for step in reversed(finished):
        try:
            saved = processes.together(lambda step=step: _look(workdir, step))
            orbax_checkpoint.verify(saved.found)
            return saved._replace(damaged=tuple(damaged))
        except InputError as error:
            damaged.append(step)
            first = first or error
    if first is not None:
        raise first
    return None


def save_checkpoint(workdir: Workdir, step: int, state: Any, metadata: dict[str, Any]) -> None:
    """Write a tree of arrays and JSON-ready metadata, then delete all but the newest two.

    Raises InputError where that cannot be done; what was saved before is then still there.
    """
    directory = _directory(workdir, step)
    try:
        orbax_checkpoint.save(directory, _KIND, _nested(state), metadata, overwrite=True)
    except InputError:
        if processes.is_first():
            with suppress(OSError):
                directory.rmdir()
        raise
    if processes.is_first():
        whole = [one for one in steps(workdir) if _is_whole(workdir, one)]
        for other in set(steps(workdir)) - set(whole[-KEPT:]):
            checkpoint_directory.delete(_directory(workdir, other), _KIND)


def restore(saved: Saved, state: Any) -> Any:
    """The saved arrays in the tree of `state`, in its shapes, dtypes and shardings.

    `state` holds arrays or ShapeDtypeStructs with shardings. Raises InputError where the checkpoint
    is of another shape.
    """
    wanted = _nested(jax.tree.map(_described, state))
    ours, theirs = _shapes(wanted), _shapes(saved.found.arrays)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"{saved.found.directory}: {name} is {theirs.get(name, 'missing')} there and "
                f"{ours.get(name, 'unknown')} here; use another workdir"
            )
    arrays = orbax_checkpoint.restore(saved.found, wanted)
    paths, tree = tree_flatten_with_path(state)
    return jax.tree.unflatten(tree, [_lookup(arrays, path) for path, _ in paths])


def _directory(workdir: Workdir, step: int) -> Path:
    return workdir.checkpoints / f"step-{step:09d}"


def _finished(workdir: Workdir) -> list[int]:
    """The steps whose checkpoints were finished; what an interrupted save left has no number."""
    return [
        step
        for step in steps(workdir)
        if any(
            path.name.removeprefix("specjax-").isdigit()
            for path in _directory(workdir, step).glob("specjax-*")
        )
    ]


def _look(workdir: Workdir, step: int) -> Saved:
    found = orbax_checkpoint.look(_directory(workdir, step), _KIND)
    return Saved(step, found.metadata, found)


def _is_whole(workdir: Workdir, step: int) -> bool:
    try:
        _look(workdir, step)
    except InputError:
        return False
    return True


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _shapes(nested: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in dotted(nested).items()}


def _names(path: tuple) -> list[str]:
    return [leaf_name((key,)) for key in path]


def _nested(tree: Any) -> dict[str, Any]:
    """Any tree as nested dicts, without what holds no array."""
    nested: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        *above, last = _names(path)
        node = nested
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return nested


def _lookup(nested: Mapping[str, Any], path: tuple) -> Any:
    for name in _names(path):
        nested = nested[name]
    return nested
