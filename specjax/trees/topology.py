"""The shape of a token tree, known when programs are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Topology:
    """The shape of a token tree: `parents[i]` is the window slot of node i's parent.

    The root (the last committed token) is slot 0 and node i is slot i + 1. Parents come before
    children, so a chain has the parents 0, 1, 2, ... Hashable: equal shapes compile once. Raises
    ValueError where a parent does not come before its child.
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
        """N."""
        return len(self.parents)

    @property
    def width(self) -> int:
        """Slots of the window that hold the tree, the root's included: W = N + 1."""
        return len(self.parents) + 1

    @property
    def depth(self) -> int:
        """Nodes on the longest path from the root: P."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """Whether no slot has two children, so that nodes and depths are the same."""
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def ancestors(self) -> Bool[np.ndarray, "W W"]:
        """Whether slot j is slot i or one of its ancestors, the root included: the slots i sees."""
        seen = np.eye(self.width, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen

    @cached_property
    def depths(self) -> Int[np.ndarray, "W"]:
        """Each slot's distance from the root, in tokens."""
        return (self.ancestors.sum(axis=1) - 1).astype(np.int32)

    def first(self, num_nodes: int) -> Topology:
        """The tree of the first nodes alone."""
        return Topology(self.parents[:num_nodes])

    def close(self, valid: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
        """The nodes that are valid with all of their ancestors."""
        if self.is_chain:
            return jnp.cumprod(valid, axis=1, dtype=jnp.int32).astype(bool)
        return ~jnp.any(self.ancestors[None, 1:, 1:] & ~valid[:, None, :], axis=2)


def chain_topology(length: int) -> Topology:
    """The topology of a chain of `length` nodes."""
    return Topology(tuple(range(length)))
