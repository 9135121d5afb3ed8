"""The draft of one round: a token tree in buffers of fixed shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.trees.topology import AnyTopology, DynamicTopology, chain_topology


@struct.dataclass
class PartialPass:
    """The target's first layers, run over the root and every node of a draft.

    `states` are the inputs of layer `num_layers` by slot (0 is the root, i + 1 is node i), and
    `window` (a `core.cache.Window`) has the keys and values of the layers before. Slots of invalid
    nodes are unspecified, but finite where the model's are.
    """

    states: Float[Array, "B W D"]
    window: Any
    num_layers: int = struct.field(pytree_node=False)


@struct.dataclass
class Draft:
    """Up to N nodes of a token tree under the root (the last committed token).

    Only nodes that are `valid` are proposed; the decoding loop drops nodes with invalid ancestors.
    `logq_row` is the row of `logq` that a node was drawn from, before any sibling was removed; -1
    means that the node is deterministic (q is one-hot), as every node is without `logq`. `steps` is
    the number of times that the drafter of a chain ran after its first token, including runs that
    gave no token; None if each run gave a token. A tree does not need it, since drafting a tree
    counts as one run. With `partial`, verification runs only the target's remaining layers; code
    that reorders nodes leaves it out. In a merged draft `drafted_by` is the index of the drafter
    that proposed a node, the first one if several did; it has no effect on verification.
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
    Raises InputError for tokens, counts or distributions of another shape or type.
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
    if not jnp.issubdtype(jnp.result_type(num_valid), jnp.integer):
        raise InputError(
            f"chain: num_valid is {jnp.result_type(num_valid)}: pass whole numbers, such as "
            "context.limit"
        )
    if logq is not None and jnp.shape(logq)[:-1] != shape:
        raise InputError(
            f"chain: logq has shape {jnp.shape(logq)} for tokens {shape}: logq is [B, K, V], the "
            "distribution that each token was drawn from"
        )
    batch, length = shape
    step = jnp.broadcast_to(jnp.arange(length), (batch, length))
    draft = Draft(
        tokens=tokens,
        valid=step < num_valid[:, None],
        logq_row=jnp.full_like(step, -1) if logq is None else step,
        logq=logq,
        topology=chain_topology(length),
    )
    check_draft(draft, "chain:")
    return draft


def check_draft(
    draft: Draft, start: str, *, rows: int | None = None, vocab_size: int | None = None
) -> None:
    """Raise InputError unless the arrays of a draft agree with one another.

    JAX repeats an axis of length 1 and clamps indices that are out of range, so that a node would
    be verified against entries that are not its own. `start` is the beginning of the message, such
    as "drafter 'x': propose returned". The draft must have `rows` rows and distributions over
    `vocab_size` tokens; by default any number. Parents and rows of `logq` are checked unless they
    are traced; `usable` makes nodes invalid whose indices become known only on the device.
    """
    _check_array(start, "tokens", draft.tokens, jnp.integer, "B N", {})
    nodes = draft.topology.num_nodes
    sizes = {"B": draft.tokens.shape[0] if rows is None else rows, "N": nodes, "W": nodes + 1}
    arrays = [
        ("tokens", draft.tokens, jnp.integer, "B N"),
        ("valid", draft.valid, jnp.bool_, "B N"),
        ("logq_row", draft.logq_row, jnp.integer, "B N"),
        ("logq", draft.logq, jnp.floating, "B Q V"),
        ("steps", draft.steps, jnp.integer, ""),
        ("drafted_by", draft.drafted_by, jnp.integer, "B N"),
    ]
    if isinstance(draft.topology, DynamicTopology):
        parents = draft.topology.row_parents
        same_shape = jnp.shape(parents)[:1] == (1,)  # of all rows
        letters = "1 N" if same_shape else "B N"
        arrays.append(("topology.row_parents", parents, jnp.integer, letters))
    if draft.partial is not None:
        window = draft.partial.window
        arrays += [
            ("partial.states", draft.partial.states, jnp.floating, "B W D"),
            ("partial.window.k", window.k, jnp.floating, "L B G W C"),
            ("partial.window.v", window.v, jnp.floating, "L B G W C"),
            ("partial.window.positions", window.positions, jnp.integer, "B W"),
        ]
    if vocab_size is not None:
        sizes["V"] = vocab_size
    for name, array, kind, letters in arrays:
        if array is not None:
            _check_array(start, name, array, kind, letters, sizes)
    _check_indices(draft, start)


_TYPES = {jnp.integer: "int32", jnp.bool_: "bool", jnp.floating: "float32"}
_AXES = {"B": "rows", "N": "nodes", "W": "slots", "V": "tokens in the vocabulary"}


def _check_array(
    start: str, name: str, array: Any, kind: Any, letters: str, sizes: dict[str, int]
) -> None:
    """Raise InputError unless an array has the given kind of dtype, and axes of the given sizes.

    `letters` name the axes; those without an entry in `sizes` may have any length.
    """
    shape, dtype, axes = jnp.shape(array), jnp.result_type(array), letters.split()
    agrees = len(shape) == len(axes) and all(
        size == sizes.get(letter, size) for size, letter in zip(shape, axes, strict=True)
    )
    if agrees and jnp.issubdtype(dtype, kind):
        return
    known = [f"{letter} = {sizes[letter]} {_AXES[letter]}" for letter in axes if letter in sizes]
    remedy = f"use {_TYPES[kind]}[{', '.join(axes)}]"
    if known:
        remedy += f" with {', '.join(known)}"
    if not jnp.issubdtype(dtype, kind) and kind is jnp.integer:
        remedy += ", by jnp.argmax or .astype(jnp.int32)"
    raise InputError(f"{start} {name} of {dtype}{list(shape)}; {remedy}")


def _check_indices(draft: Draft, start: str) -> None:
    """Raise InputError for a valid node with a wrong row of `logq` or parent, where known."""
    valid = _known(draft.valid)
    valid = np.ones(draft.valid.shape, bool) if valid is None else valid
    row = _known(draft.logq_row)
    if draft.logq is not None and row is not None:
        count = draft.logq.shape[1]
        unknown = valid & ((row < -1) | (row >= count))
        if unknown.any():
            index, node = np.argwhere(unknown)[0]
            raise InputError(
                f"{start} logq_row[{index}, {node}] = {row[index, node]} for {count} rows of logq; "
                f"use 0 to {count - 1}, the row that the node was drawn from, or -1 for a node "
                "that was chosen"
            )
    if isinstance(draft.topology, DynamicTopology):
        parents = _known(draft.topology.row_parents)
        if parents is None:
            return
        parents = np.broadcast_to(parents, valid.shape)
        late = valid & ((parents < 0) | (parents > np.arange(valid.shape[1])))
        if late.any():
            index, node = np.argwhere(late)[0]
            raise InputError(
                f"{start} topology.row_parents[{index}, {node}] = {parents[index, node]}; use 0 to "
                f"{node}, the slots of the root and of earlier nodes"
            )
        deep = valid & ~np.asarray(draft.topology.row_connected)
        if deep.any():
            index, node = np.argwhere(deep)[0]
            raise InputError(
                f"{start} a topology of depth {draft.topology.depth}, and the path to node {node} "
                f"of row {index} has more nodes; use the number of nodes on the longest path"
            )


def _known(array: Any) -> np.ndarray | None:
    """Return the array's entries, or None while it is traced."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def usable(draft: Draft) -> Draft:
    """Return the draft with nodes invalid that name a row of `logq` or a parent that is not there.

    Without `logq` every node becomes deterministic. This is for indices that `check_draft` cannot
    read while they are traced. A node whose row does not exist may not count as deterministic,
    since its token depends on those of the siblings that were drawn before it.
    """
    if draft.logq is None:
        row, exists = jnp.full_like(draft.logq_row, -1), jnp.bool_(True)
    else:
        row = draft.logq_row
        exists = (row >= -1) & (row < draft.logq.shape[1])
    return draft.replace(valid=draft.valid & exists & draft.topology.row_connected, logq_row=row)
