"""The placement of a run's arrays: rows over devices, parameters and moments over `data`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.distributed.sharding import DATA, axis_size
from train.data.batches import Batch
from train.run.config import BatchConfig


@dataclass(frozen=True)
class Placement:
    """The placement of host rows on the devices, as `micro` micro-batches of `per_micro` rows.

    `held` are the rows of a micro-batch that this process holds.
    """

    micro: int
    per_micro: int
    held: tuple[int, ...]
    mesh: Mesh | None

    @property
    def rows(self) -> list[int]:
        """The indices of this process's rows in a whole batch."""
        return [first * self.per_micro + row for first in range(self.micro) for row in self.held]

    def put(self, batch: Batch) -> Batch:
        """Return a host batch of this process's rows on the devices, as [micro, per_micro, ...]."""
        return jax.tree.map(self._put, batch)

    def _put(self, leaf: np.ndarray) -> jax.Array:
        local = leaf.reshape(self.micro, len(self.held), *leaf.shape[1:])
        if self.mesh is None:
            return jax.device_put(local)
        spread = NamedSharding(self.mesh, PartitionSpec(None, DATA))
        shape = (self.micro, self.per_micro, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(spread, local, shape)


def placement_of(config: BatchConfig, mesh: Mesh | None) -> Placement:
    """Return the placement of batches on a mesh, or on one device if `mesh` is None."""
    per_micro = config.batch_size // config.accumulate
    held = tuple(range(per_micro))
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec(DATA))
        parts = rows.addressable_devices_indices_map((per_micro,)).values()
        held = tuple(sorted({row for (part,) in parts for row in range(per_micro)[part]}))
    return Placement(config.accumulate, per_micro, held, mesh)


def gathered(tree: Any, mesh: Mesh | None) -> Any:
    """Return the tree with every array replicated on all devices of the mesh."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=whole)(tree)


def split_over_data(tree: Any, mesh: Mesh, split: bool) -> Any:
    """Return a sharding for each array of a tree: replicated, or with `split` over the axis `data`.

    An array is split along its longest axis that is divisible by the size of `data`, if any.
    """
    devices = axis_size(mesh, DATA)

    def sharding(leaf: Any) -> NamedSharding:
        axes: list[str | None] = [None] * np.ndim(leaf)
        dividing = [axis for axis, size in enumerate(np.shape(leaf)) if size % devices == 0]
        if split and devices > 1 and dividing:
            axes[max(dividing, key=lambda axis: leaf.shape[axis])] = DATA
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


def copied(tree: Any, mesh: Mesh | None, split: bool = False) -> Any:
    """Return copies of arrays, replicated or `split` over `data`, so that they can be donated.

    Every process must pass the same values.
    """

    def host(leaf: Any) -> Any:
        elsewhere = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return leaf if mesh is None or elsewhere else np.asarray(leaf)

    shardings = None if mesh is None else split_over_data(tree, mesh, split)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
    return copy(jax.tree.map(host, tree))
