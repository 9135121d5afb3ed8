"""The state of recurrent layers: what is committed, and what the tokens of a window add to it.

A recurrent layer has a short causal convolution and, unless it is nothing else, a matrix per head.
Each token multiplies the matrix of its parent by a decay and adds the outer product of a key and a
value. So the matrices of a window's slots need never be stored: those of all slots follow from the
committed one, the keys and the values, and an accepted path is committed by one sum.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

Rows = TypeVar("Rows")


class ByRow:
    """Arrays with rows as their second axis."""

    def take(self: Rows, rows: Int[Array, "A"]) -> Rows:
        """Return the arrays of only the given rows, in that order."""
        return jax.tree.map(lambda array: array[:, rows], self)

    def admit(self: Rows, rows: Int[Array, "A"], new: Rows) -> Rows:
        """Return the arrays with row i of `new` at row `rows[i]`; rows out of range are dropped."""
        return jax.tree.map(lambda into, one: into.at[:, rows].set(one, mode="drop"), self, new)


@struct.dataclass
class RecurrentState(ByRow):
    """The state of M recurrent layers after the committed tokens of each row.

    `inputs` are the last K - 1 inputs of the convolution, the latest one last, in G groups of X. A
    group belongs to one of G key heads, and a mesh shards groups and heads over its devices.
    `matrix` has a matrix of N keys and P values for each of H heads; None for layers without.
    """

    inputs: Float[Array, "M B taps G X"]
    matrix: Float[Array, "M B H N P"] | None

    def advanced(
        self, window: RecurrentWindow, slots: Int[Array, "B T"], count: Int[Array, "B"]
    ) -> RecurrentState:
        """Return the state after the first `count` of each row's window `slots`, a path."""
        kept = self.inputs.shape[2]
        inputs = jnp.concatenate([self.inputs, _at(window.inputs, slots)], axis=2)
        inputs = _at(inputs, count[:, None] + jnp.arange(kept)[None, :])
        if self.matrix is None:
            return self.replace(inputs=inputs)
        counts = jnp.arange(slots.shape[1])[None, :] < count[:, None]

        def path(layer: Int[Array, ""], array: jax.Array) -> jax.Array:
            """Return the entries of the path, and 0 after it, where they need not be numbers."""
            of_path = _at(_layer(array, layer)[None], slots)[0]
            mask = counts.reshape(*counts.shape, *(1 for _ in of_path.shape[2:]))
            return jnp.where(mask, of_path, 0)

        def advance(layer: Int[Array, ""], matrix: jax.Array) -> jax.Array:
            keys, values = path(layer, window.keys), path(layer, window.values)
            decays = path(layer, window.log_decays)
            # The decays after each token of the path; those of the whole path come first.
            after = lax.cumsum(jnp.pad(decays, ((0, 0), (0, 1), (0, 0))), axis=1, reverse=True)
            weighted = jnp.exp(after[:, 1:])[..., None] * values
            keys = jnp.repeat(keys, values.shape[2] // keys.shape[2], axis=2)
            added = jnp.einsum("bthn,bthp->bhnp", keys, weighted, precision="highest")
            new = _layer(matrix, layer) * jnp.exp(after[:, 0])[:, :, None, None] + added
            return lax.dynamic_update_index_in_dim(matrix, new, layer, 0)

        matrix = lax.fori_loop(0, len(self.matrix), advance, self.matrix)
        return self.replace(inputs=inputs, matrix=matrix)


@struct.dataclass
class RecurrentWindow(ByRow):
    """What each slot of a window adds to the state of M recurrent layers.

    `inputs` are those of the convolution. The matrix of a slot is that of its parent times
    exp(`log_decays`), plus the outer product of its key and its value; the H heads share G keys.
    Where layers have no matrix, these are None.
    """

    inputs: Float[Array, "M B W G X"]
    keys: Float[Array, "M B W G N"] | None
    values: Float[Array, "M B W H P"] | None
    log_decays: Float[Array, "M B W H"] | None

    def padded(self, slots: int) -> RecurrentWindow:
        """Return the window with `slots` more slots at its end."""

        def pad(array: jax.Array) -> jax.Array:
            return jnp.pad(array, [(0, slots if axis == 2 else 0) for axis in range(array.ndim)])

        return jax.tree.map(pad, self)

    def at_slots(self, slots: slice | Int[np.ndarray, "A"]) -> RecurrentWindow:
        """Return the window with only the given slots, in that order."""
        return jax.tree.map(lambda array: array[:, :, slots], self)


def _layer(stacked: jax.Array, layer: Int[Array, ""]) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, layer, keepdims=False, allow_negative_indices=False)


def _at(
    array: Shaped[Array, "M B W *rest"], slots: Int[Array, "B T"]
) -> Shaped[Array, "M B T *rest"]:
    """Return the entries of `array` at each row's `slots`."""
    index = slots.reshape(1, *slots.shape, *(1 for _ in array.shape[3:]))
    return jnp.take_along_axis(array, index, axis=2)
