"""A tree of small arrays as one array, which reaches the host in one transfer."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int


@struct.dataclass
class Packed:
    """The arrays of a tree, all of 32 bits, one after the other as whole numbers.

    Each array that the host reads costs it some 10 us, and twice that when caches are cold.
    """

    numbers: Int[Array, "n"]
    tree: Any = struct.field(pytree_node=False)
    """The structure of the tree."""
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...] = struct.field(pytree_node=False)
    """The shape and dtype of each of its arrays."""

    @classmethod
    def of(cls, arrays: Any) -> Packed:
        """Return a tree of arrays packed; raise ValueError for an array that is not of 32 bits."""
        leaves, tree = jax.tree.flatten(arrays)
        forms = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        if any(dtype.itemsize != 4 for _, dtype in forms):
            raise ValueError(f"{forms}: pack arrays of 32 bits")
        each = [jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1) for leaf in leaves]
        return cls(jnp.concatenate(each), tree, forms)

    def read(self) -> Any:
        """Return the tree with NumPy arrays, once the devices have computed them."""
        numbers, begin, leaves = np.asarray(self.numbers), 0, []
        for shape, dtype in self.leaves:
            end = begin + math.prod(shape)
            leaves.append(numbers[begin:end].view(dtype).reshape(shape))
            begin = end
        return jax.tree.unflatten(self.tree, leaves)
