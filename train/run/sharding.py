"""Where a run's arrays are placed: rows over devices, parameters and moments split over `data`."""

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
    """Puts host rows on the devices, as `micro` micro-batches of `per_micro` rows each.

    `rows` are the numbers of the rows of a whole batch that this process holds; `put` takes a host
    batch of just these, and gives one with the leading axes [micro, per_micro].
    """

    micro: int
    per_micro: int
    held: tuple[int, ...]
    mesh: Mesh | None

    @property
    def rows(self) -> list[int]:
        """The numbers of this process's rows in a whole batch."""
        return [first * self.per_micro + row for first in range(self.micro) for row in self.held]

    def put(self, batch: Batch) -> Batch:
        """The batch on the devices."""
        return jax.tree.map(self._put, batch)

    def _put(self, leaf: np.ndarray) -> jax.Array:
        local = leaf.reshape(self.micro, len(self.held), *leaf.shape[1:])
        if self.mesh is None:
            return jax.device_put(local)
        spread = NamedSharding(self.mesh, PartitionSpec(None, DATA))
        shape = (self.micro, self.per_micro, *leaf.shape[1:])
        column_of = {row: column for column, row in enumerate(self.held)}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return local[:, [column_of[row] for row in range(self.per_micro)[index[1]]]]

        return jax.make_array_from_callback(shape, spread, part)


def placement_of(config: BatchConfig, mesh: Mesh | None) -> Placement:
    """How these batches are placed on a mesh."""
    per_micro = config.batch_size // config.accumulate
    held = tuple(range(per_micro))
    if mesh is not None:
        rows = NamedSharding(mesh, PartitionSpec(DATA))
        parts = rows.addressable_devices_indices_map((per_micro,)).values()
        held = tuple(sorted({row for (part,) in parts for row in range(per_micro)[part]}))
    return Placement(config.accumulate, per_micro, held, mesh)


def gathered(tree: Any, mesh: Mesh | None) -> Any:
    """The tree with every array whole on each device."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda tree: tree, out_shardings=whole)(tree)


def split_over_data(tree: Any, mesh: Mesh, split: bool) -> Any:
    """Each array split over `data` along its longest axis that divides, or whole."""
    devices = axis_size(mesh, DATA)

    def one(leaf: Any) -> NamedSharding:
        axes: list[str | None] = [None] * leaf.ndim
        dividing = [axis for axis, size in enumerate(leaf.shape) if size % devices == 0]
        if split and devices > 1 and dividing:
            axes[max(dividing, key=lambda axis: leaf.shape[axis])] = DATA
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(one, tree)


def copied(params: Any, mesh: Mesh | None, split: bool) -> Any:
    """Parameters in buffers of their own: donated buffers must not be the target's."""
    if mesh is None:
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)

    def spread(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
        host = np.array(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])

    return jax.tree.map(spread, params, split_over_data(params, mesh, split))


def whole(value: np.ndarray | np.generic, mesh: Mesh | None) -> jax.Array:
    """A host array on every device."""
    if mesh is None:
        return jnp.asarray(value)
    host = np.asarray(value)
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])
