"""Token trees in fixed-shape buffers: what a drafter proposes in one round."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class Draft:
    """Up to N nodes of a token tree under the root (the last committed token).

    Node i sits in window slot i + 1, the root in slot 0; `parents` are slots, and parents come
    before children, so a chain has parents 0, 1, 2, ... A row's node that is not `valid` was never
    proposed; `valid` is closed under ancestors. `logq_row` names the row of `logq` a node was drawn
    from, before any sibling was removed; -1 says the node is deterministic (q is one-hot).
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array | np.ndarray, "N"]
    valid: Bool[Array, "B N"]
    logq_row: Int[Array, "B N"]
    logq: Float[Array, "B Q V"] | None = None


def chain(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    logq: Float[Array, "B K V"] | None = None,
) -> Draft:
    """A draft without branches: row b proposes its first `num_valid[b]` tokens.

    With `logq`, node i was drawn from `logq[:, i]`; without it every node is deterministic.
    """
    batch, length = tokens.shape
    step = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return Draft(
        tokens=tokens,
        parents=np.arange(length),
        valid=step < num_valid[:, None],
        logq_row=jnp.full_like(step, -1) if logq is None else step,
        logq=logq,
    )


def is_chain(draft: Draft) -> bool:
    """Whether the draft is known, while tracing, to have no branches."""
    parents = draft.parents
    return isinstance(parents, np.ndarray) and bool((parents == np.arange(len(parents))).all())


def ancestors(parents: Int[np.ndarray, "N"]) -> Bool[np.ndarray, "W W"]:
    """Which slots each slot sees among the tree's: itself and its ancestors, the root included."""
    seen = np.eye(len(parents) + 1, dtype=bool)
    for node, parent in enumerate(parents, start=1):
        seen[node] |= seen[parent]
    return seen


def depths(parents: Int[np.ndarray, "N"]) -> Int[np.ndarray, "W"]:
    """How far each slot lies below the root, in tokens."""
    return ancestors(parents).sum(axis=1) - 1
