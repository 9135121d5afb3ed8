"""The shape of a token tree, static at compile time or chosen on the device.

`Topology` and `DynamicTopology` have the same properties. Those named `row_...` have a leading axis
of rows, of length 1 if all rows have the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_static
@dataclass(frozen=True)
class Topology:
    """The shape of a token tree: `parents[i]` is the window slot of node i's parent.

    The root (the last committed token) is slot 0 and node i is slot i + 1. Parents come before
    children, so a chain has the parents 0, 1, 2, ... Hashable, so that equal shapes share a
    compiled program. Raises ValueError if a parent does not come before its child.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not 0 <= parent <= node:
                raise ValueError(
                    f"parents[{node}]={parent}: a parent is the slot of an earlier node, or 0 for "
                    f"the root; use 0 to {node}"
                )

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N)."""
        return len(self.parents)

    @property
    def width(self) -> int:
        """The number of window slots, root included: W = N + 1."""
        return len(self.parents) + 1

    @property
    def depth(self) -> int:
        """The number of nodes on the longest path from the root (P)."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """Whether no slot has more than one child, so that the depth equals the number of nodes."""
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def ancestors(self) -> Bool[np.ndarray, "W W"]:
        """Whether slot j is slot i or an ancestor of it, so that i attends to j; indexed [i, j]."""
        seen = np.eye(self.width, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen

    @cached_property
    def depths(self) -> Int[np.ndarray, "W"]:
        """The distance of each slot from the root, in tokens."""
        return (self.ancestors.sum(axis=1) - 1).astype(np.int32)

    @property
    def row_parents(self) -> Int[np.ndarray, "1 N"]:
        """`parents` as an array with a row axis."""
        return np.array(self.parents, np.int32)[None]

    @property
    def row_ancestors(self) -> Bool[np.ndarray, "1 W W"]:
        """`ancestors` with a row axis."""
        return self.ancestors[None]

    @property
    def row_depths(self) -> Int[np.ndarray, "1 W"]:
        """`depths` with a row axis."""
        return self.depths[None]

    @property
    def row_connected(self) -> Bool[np.ndarray, "1 N"]:
        """True for each node, since parents are checked when the topology is made."""
        return np.ones((1, self.num_nodes), bool)

    def first(self, num_nodes: int) -> Topology:
        """Return the tree of the first `num_nodes` nodes."""
        return Topology(self.parents[:num_nodes])

    def close(self, valid: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
        """Return which nodes are valid and have only valid ancestors."""
        if self.is_chain:
            return jnp.cumprod(valid, axis=1, dtype=jnp.int32).astype(bool)
        return _closed(valid, self.row_ancestors)

    def along_paths(self, each: Float[Array, "B N"]) -> Float[Array, "B N"]:
        """Return for each node the product of `each` over the node and its ancestors.

        The entries of `each` are in [0, 1].
        """
        if self.is_chain:
            return jnp.cumprod(each, axis=1)
        return _along_paths(each, self.row_ancestors)


@struct.dataclass
class DynamicTopology:
    """A tree shape per row: `row_parents[b, i]` is the window slot of node i's parent in row b.

    Slots are numbered as in `Topology`, and parents come before children. `depth` (P) is an upper
    bound on the number of nodes on a path. Entries of invalid nodes are arbitrary.
    """

    row_parents: Int[Array, "B N"]
    depth: int = struct.field(pytree_node=False)

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N)."""
        return self.row_parents.shape[1]

    @property
    def width(self) -> int:
        """The number of window slots: W = N + 1."""
        return self.num_nodes + 1

    @property
    def is_chain(self) -> bool:
        """False, since the shape is not known at compile time."""
        return False

    @property
    def row_ancestors(self) -> Bool[Array, "B W W"]:
        """Whether slot j of row b is slot i or an ancestor of it, indexed [b, i, j]."""
        slots = jnp.arange(self.width)
        ancestors_by_step, seen = self._ancestors_by_step(), jnp.zeros((1, 1, 1), bool)
        for slot in ancestors_by_step:
            seen = seen | (slot[:, :, None] == slots[None, None, :])
        return seen

    @property
    def row_depths(self) -> Int[Array, "B W"]:
        """The distance of each slot from the root, in tokens."""
        return sum((slot > 0).astype(jnp.int32) for slot in self._ancestors_by_step())

    @property
    def row_connected(self) -> Bool[Array, "B N"]:
        """Whether a node's parent is an earlier slot, and at most `depth` nodes are on its path.

        Indices out of range are clamped in compiled code, so that other nodes would be verified
        with the keys and at the position of a slot that is not their parent's.
        """
        parents = self.row_parents
        earlier = (parents >= 0) & (parents <= jnp.arange(self.num_nodes)[None, :])
        return earlier & (self._ancestors_by_step()[-1][:, 1:] == 0)

    def _ancestors_by_step(self) -> list[Int[Array, "B W"]]:
        """Return each slot, its parent, its grandparent, and so on; the root is its own parent."""
        parents = jnp.pad(self.row_parents, ((0, 0), (1, 0)))
        ancestors_by_step = [jnp.broadcast_to(jnp.arange(self.width), parents.shape)]
        for _ in range(self.depth):
            ancestors_by_step.append(jnp.take_along_axis(parents, ancestors_by_step[-1], axis=1))
        return ancestors_by_step

    def first(self, num_nodes: int) -> DynamicTopology:
        """Return the tree of the first `num_nodes` nodes."""
        return DynamicTopology(self.row_parents[:, :num_nodes], min(self.depth, num_nodes))

    def close(self, valid: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
        """Return which nodes are valid and have only valid ancestors."""
        return _closed(valid, self.row_ancestors)

    def along_paths(self, each: Float[Array, "B N"]) -> Float[Array, "B N"]:
        """Return for each node the product of `each` over the node and its ancestors.

        The entries of `each` are in [0, 1].
        """
        return _along_paths(each, self.row_ancestors)


AnyTopology = Topology | DynamicTopology
"""A tree shape, known at compile time or chosen on the device."""


def chain_topology(length: int) -> Topology:
    """Return the topology of a chain of `length` nodes."""
    return Topology(tuple(range(length)))


def _closed(
    valid: Bool[Array, "B N"], ancestors: Bool[Array | np.ndarray, "#B W W"]
) -> Bool[Array, "B N"]:
    return ~jnp.any(ancestors[:, 1:, 1:] & ~valid[:, None, :], axis=2)


def _along_paths(
    each: Float[Array, "B N"], ancestors: Bool[Array | np.ndarray, "#B W W"]
) -> Float[Array, "B N"]:
    return jnp.where(ancestors[:, 1:, 1:], each[:, None, :], 1.0).prod(axis=2)
