"""What a drafter proposes in one round: a token tree in buffers of fixed shape."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.trees.topology import AnyTopology, chain_topology


@struct.dataclass
class Draft:
    """Up to N nodes of a token tree under the root (the last committed token).

    A row's node that is not `valid` was never proposed; `valid` is closed under ancestors, which
    the loop sees to. `logq_row` names the row of `logq` a node was drawn from, before any sibling
    was removed; -1 says the node is deterministic (q is one-hot). `steps` is how often the
    drafter ran after its first token, where that is not once for each further token of the longest
    row: it may have looked at what comes next, and stopped.
    """

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    logq_row: Int[Array, "B N"]
    logq: Float[Array, "B Q V"] | None
    topology: AnyTopology
    steps: Int[Array, ""] | None = None


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
        valid=step < num_valid[:, None],
        logq_row=jnp.full_like(step, -1) if logq is None else step,
        logq=logq,
        topology=chain_topology(length),
    )
