"""The draft of one round: a token tree in buffers of fixed shape."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import Window
from specjax.errors import InputError
from specjax.trees.topology import AnyTopology, chain_topology


@struct.dataclass
class PartialPass:
    """The target's first layers, run over the root and every node of a draft.

    `states` are the inputs of layer `num_layers` by slot (0 is the root, i + 1 is node i), and
    `window` has the keys and values of the layers before. Slots of invalid nodes are unspecified,
    but finite where the model's are.
    """

    states: Float[Array, "B W D"]
    window: Window
    num_layers: int = struct.field(pytree_node=False)


@struct.dataclass
class Draft:
    """Up to N nodes of a token tree under the root (the last committed token).

    Only nodes that are `valid` are proposed; the decoding loop drops nodes with invalid ancestors.
    `logq_row` is the row of `logq` that a node was drawn from, before any sibling was removed; -1
    means that the node is deterministic (q is one-hot). `steps` is the number of times that the
    drafter of a chain ran after its first token, including runs that gave no token; None if each
    run gave a token. A tree does not need it, since drafting a tree counts as one run. With
    `partial`, verification runs only the target's remaining layers; code that reorders nodes leaves
    it out. In a merged draft `drafted_by` is the index of the drafter that proposed a node, the
    first one if several did; it has no effect on verification.
    """

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    logq_row: Int[Array, "B N"]
    logq: Float[Array, "B Q V"] | None
    topology: AnyTopology
    steps: Int[Array, ""] | None = None
    partial: PartialPass | None = None
    drafted_by: Int[Array, "B N"] | None = None


def chain(
    tokens: Int[Array, "B K"],
    num_valid: Int[Array, "B"],
    logq: Float[Array, "B K V"] | None = None,
) -> Draft:
    """Return a draft without branches, of which row b proposes the first `num_valid[b]` tokens.

    If `logq` is given, node i was drawn from `logq[:, i]`; without it, every node is deterministic.
    Raises InputError for tokens or counts of another shape, or tokens that are no integers.
    """
    shape, dtype = jnp.shape(tokens), jnp.result_type(tokens)
    if len(shape) != 2:
        raise InputError(
            f"chain: tokens have the shape {list(shape)}: pass [B, K], K tokens for each of B rows"
        )
    if not jnp.issubdtype(dtype, jnp.integer):
        raise InputError(
            f"chain: tokens are {dtype}: pass whole numbers, by jnp.argmax or .astype(jnp.int32)"
        )
    if jnp.shape(num_valid) != shape[:1]:
        raise InputError(
            f"chain: num_valid has shape {jnp.shape(num_valid)} for tokens {shape}: tokens are "
            "[B, K], and num_valid has one count per row, [B], such as context.limit"
        )
    batch, length = tokens.shape
    step = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return Draft(
        tokens=tokens,
        valid=step < num_valid[:, None],
        logq_row=jnp.full_like(step, -1) if logq is None else step,
        logq=logq,
        topology=chain_topology(length),
    )
