"""Verification of a drafted token tree: the accepted path, and the token that follows.

A chain is a tree without branches. As in `chain_verification`, uniforms and noise are arguments,
and the target's distributions are given by a function of one slot per row: slot 0 is the last
committed token and slot i + 1 is node i. Rules walk from the root down and visit each slot of the
path once, so that every random choice belongs to a node, not to one of the paths through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling.chain_verification import (
    Distributions,
    Verification,
    draft_distributions,
    one_hot_distributions,
    pick,
)
from specjax.sampling.distributions import log_ratio, residual

Choose = Callable[[Int[Array, "B"], Int[Array, "B"]], Int[Array, "B"]]
"""A function from one slot per row, and its depth, to the token that the target draws after it."""


class Drafted(NamedTuple):
    """A drafted tree in the form that rules read.

    Slot 0 of the window is the root, and slot i + 1 is node i with token `tokens[:, i]`. The parent
    of node i is slot `parents[i]` (one shape for all rows) or `parents[b, i]`. Nodes that are not
    `valid` were not proposed; a valid node has valid ancestors. Node i was drawn from row
    `logq_row[:, i]` of `logq`; if that index is -1, or `logq` is None, the node is deterministic.
    Siblings from the same row of `logq` were drawn without replacement and are numbered in the
    order drawn; if one is valid, so are those drawn before it. No path has more than `depth` nodes
    (P). `whole` are the parents of the whole tree of which these are the first nodes, if its shape
    is known at compile time.
    """

    tokens: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    parents: tuple[int, ...] | Int[Array | np.ndarray, "#B N"]
    depth: int
    logq_row: Int[Array, "B N"]
    logq: Float[Array, "B Q V"] | None
    whole: tuple[int, ...] | None = None

    @property
    def num_valid(self) -> Int[Array, "B"]:
        """The number of proposed nodes in each row; those of a chain are its first nodes."""
        return self.valid.sum(axis=1, dtype=jnp.int32)

    @property
    def is_chain(self) -> bool:
        """Whether the tree is a chain whose shape is known at compile time."""
        return isinstance(self.parents, tuple) and self.parents == tuple(range(len(self.parents)))

    @property
    def parent_slots(self) -> Int[Array, "B N"]:
        """The window slot of each node's parent, for every row."""
        parents = jnp.asarray(self.parents, jnp.int32)
        return jnp.broadcast_to(jnp.atleast_2d(parents), self.tokens.shape)

    def distributions(self, vocab: int, dtype: jnp.dtype | type = jnp.float32) -> Distributions:
        """Return a function from one slot per row to the distribution q of the token after it.

        The draft must be a chain.
        """
        if self.logq is None:
            return one_hot_distributions(self.tokens, vocab, dtype)
        return draft_distributions(self.tokens, self.logq_row, self.logq)


def chain_drafted(
    tokens: Int[Array, "B K"], num_valid: Int[Array, "B"], logq: Float[Array, "B K V"] | None = None
) -> Drafted:
    """Return a chain of tokens, the first `num_valid[b]` of which were proposed in row b.

    If `logq` is given, token i was drawn from `logq[:, i]`; without it, every token is
    deterministic.
    """
    batch, length = tokens.shape
    step = jnp.broadcast_to(jnp.arange(length), (batch, length))
    row = jnp.full_like(step, -1) if logq is None else step
    return Drafted(tokens, step < num_valid[:, None], tuple(range(length)), length, row, logq)


def walk(drafted: Drafted, choose: Choose) -> Verification:
    """Draw the target's token at each slot, and step to the child that has that token, if any.

    `choose` maps one slot per row and its depth to the tokens that the target draws there. The
    result is exact for every tree whose tokens do not depend on the noise of these draws. It is
    also exact if the tokens were drawn with the same noise by position (`coupled`, Daliri et al.
    2408.07978): the output is then that of plain decoding with that noise, whatever was drafted.
    The number of slots visited is one more than the largest number of accepted tokens in any row.
    """

    def visit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        slots, depth, walking, _, path = state
        choice = choose(slots, depth)
        children = drafted.valid & (drafted.parent_slots == slots[:, None])
        child = _first_slot(children & (drafted.tokens == choice[:, None]))
        step = walking & (child > 0)
        path = _extended(path, depth, child, step)
        return jnp.where(step, child, slots), depth + step, step, choice, path

    zeros = jnp.zeros(drafted.tokens.shape[0], jnp.int32)
    path = jnp.full((len(zeros), drafted.depth), -1, jnp.int32)
    state = (zeros, zeros, jnp.ones(len(zeros), bool), zeros, path)
    _, accepted, _, choice, path = lax.while_loop(lambda state: jnp.any(state[2]), visit, state)
    return Verification(path, accepted, choice.astype(jnp.int32))


def walk_greedy(drafted: Drafted, choices: Int[Array, "B W"]) -> Verification:
    """Walk down the tree along `choices`, the target's most likely token at each slot.

    This is equivalent to `walk`, but compares all slots at once instead of looping along the path.
    """
    batch, slots = choices.shape
    parents = drafted.parent_slots
    agrees = drafted.tokens == jnp.take_along_axis(choices, parents, axis=1)
    accept = jnp.pad(agrees & drafted.valid, ((0, 0), (1, 0)), constant_values=True)
    # Each slot looks at its parent, then two, four, ... steps up; the root's parent is itself.
    ancestors = jnp.pad(parents, ((0, 0), (1, 0)))
    depth = jnp.broadcast_to(jnp.minimum(jnp.arange(slots, dtype=jnp.int32), 1), (batch, slots))
    for _ in range(drafted.depth.bit_length()):
        accept &= jnp.take_along_axis(accept, ancestors, axis=1)
        depth += jnp.take_along_axis(depth, ancestors, axis=1)
        ancestors = jnp.take_along_axis(ancestors, ancestors, axis=1)
    accepted = jnp.max(jnp.where(accept, depth, 0), axis=1)
    step = jnp.arange(1, drafted.depth + 1)
    on_path_at_depth = accept[:, None, :] & (depth[:, None, :] == step[None, :, None])
    # Siblings with equal tokens make equal paths, so the first one is taken.
    path = jnp.where(on_path_at_depth.any(axis=2), jnp.argmax(on_path_at_depth, axis=2), -1).astype(
        jnp.int32
    )
    last = pick(jnp.pad(path, ((0, 0), (1, 0))), accepted)
    return Verification(path, accepted, pick(choices, last))


class Recursion(NamedTuple):
    """The result of `recursion` or `multipath_block`.

    `path_slots` are the slots of the accepted nodes in order, padded with -1; `next_logp` are the
    log-probabilities of the token after the path.
    """

    path_slots: Int[Array, "B P"]
    num_accepted: Int[Array, "B"]
    next_logp: Float[Array, "B V"]


def recursion(drafted: Drafted, target: Distributions, uniforms: Float[Array, "B N"]) -> Recursion:
    """Apply rejection sampling to a tree, testing children one at a time in the order drawn.

    At a slot with distribution p, a child x drawn from q is accepted if u q(x) < p(x), where u is
    the child's uniform, and the walk continues from x. Otherwise p becomes norm(max(0, p - q)), x
    is removed from q, which is renormalized, and the next child is tested. If no child is accepted,
    the next token is distributed as the remaining p. A deterministic child has one-hot q. On a
    chain this equals `chain_verification.rejection`. The number of iterations is that of the row
    that tests the most children. (SpecInfer, 2305.09781, section 4.3, with children drawn without
    replacement as in Sequoia, 2402.12374, section 3.2.)
    """
    batch = drafted.tokens.shape[0]

    def visit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        slots, child, depth, path, logp = state
        waiting = child > 0
        node = jnp.maximum(child - 1, 0)
        token = pick(drafted.tokens, node)
        logq = node_distribution(drafted, node, logp.shape[1], logp.dtype)
        odds = log_ratio(pick(logp, token), pick(logq, token))
        # As on chains: p = 0 is refused even at u = 0, and so is q = 0.
        accept = waiting & (jnp.log(pick(uniforms, node)) < odds) & jnp.isfinite(odds)
        refuse = waiting & ~accept
        path = _extended(path, depth, child, accept)
        slots = jnp.where(accept, child, slots)
        # A warp and a residual read the whole vocabulary: computed only if some row needs one.
        logp = lax.cond(
            jnp.any(refuse),
            lambda: jnp.where(refuse[:, None], residual(logp, logq), logp),
            lambda: logp,
        )
        logp = lax.cond(
            jnp.any(accept),
            lambda: jnp.where(accept[:, None], target(slots), logp),
            lambda: logp,
        )
        tested = jnp.where(accept, 0, child)
        child = jnp.where(waiting, next_child(drafted, slots, tested), 0)
        return slots, child, depth + accept, path, logp

    zeros = jnp.zeros(batch, jnp.int32)
    path = jnp.full((batch, drafted.depth), -1, jnp.int32)
    state = (zeros, next_child(drafted, zeros, zeros), zeros, path, target(zeros))
    _, _, accepted, path, logp = lax.while_loop(lambda state: jnp.any(state[1] > 0), visit, state)
    return Recursion(path, accepted, logp)


def next_child(
    drafted: Drafted, slots: Int[Array, "B"], tested: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Return the slot of the first child of `slots[b]` after slot `tested[b]`, or 0 for none."""
    nodes = jnp.arange(1, drafted.tokens.shape[1] + 1)[None, :]
    children = drafted.valid & (drafted.parent_slots == slots[:, None])
    return _first_slot(children & (nodes > tested[:, None]))


def path_to(drafted: Drafted, last: Int[Array, "B"]) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """Return the slots of the path from the root to slot `last[b]`, padded with -1, and its length.

    The root itself is not in it.
    """
    parents = jnp.pad(drafted.parent_slots, ((0, 0), (1, 0)))
    upwards = [jnp.zeros((len(last), 0), jnp.int32)]
    for _ in range(drafted.depth):
        upwards.append(last[:, None])
        last = pick(parents, last)
    slots = jnp.concatenate(upwards, axis=1)
    length = (slots > 0).sum(axis=1, dtype=jnp.int32)
    step = jnp.arange(drafted.depth)[None, :]
    path = jnp.take_along_axis(slots, jnp.maximum(length[:, None] - 1 - step, 0), axis=1)
    return jnp.where(step < length[:, None], path, -1), length


def node_distribution(
    drafted: Drafted, node: Int[Array, "B"], vocab: int, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "B V"]:
    """Return the log-probabilities from which node `node[b]` of each row b was drawn.

    These are the node's row of `logq` with the siblings drawn before it removed, renormalized; for
    a deterministic node they are one-hot. `vocab` is V, and `dtype` that of the result.
    """
    certain = one_hot_distributions(drafted.tokens, vocab, dtype)(node)
    if drafted.logq is None:
        return certain
    row = pick(drafted.logq_row, node)
    logq = pick(drafted.logq, jnp.maximum(row, 0))
    earlier_siblings = jnp.arange(drafted.tokens.shape[1])[None, :] < node[:, None]
    earlier_siblings &= drafted.parent_slots == pick(drafted.parent_slots, node)[:, None]
    earlier_siblings &= drafted.valid & (drafted.logq_row == row[:, None])
    removed_tokens = jnp.where(earlier_siblings, drafted.tokens, vocab)
    remaining = logq.at[jnp.arange(len(removed_tokens))[:, None], removed_tokens].set(
        -jnp.inf, mode="drop"
    )
    log_mass = logsumexp(remaining, axis=-1, keepdims=True)
    remaining -= jnp.where(log_mass > -jnp.inf, log_mass, 0)
    # The first sibling keeps `logq` as it is: dividing by a sum of 1 would round it.
    remaining = jnp.where(earlier_siblings.any(axis=1, keepdims=True), remaining, logq)
    return jnp.where((row < 0)[:, None], certain, remaining)


def typical(
    drafted: Drafted, target: Distributions, epsilon: float, delta: float
) -> tuple[Int[Array, "B P"], Int[Array, "B"], Int[Array, "B"]]:
    """Return the longest path of sufficiently likely nodes (typical acceptance; not exact).

    A node x is accepted if p(x) > min(epsilon, delta exp(-H(p))), where p is the distribution after
    its parent and H the entropy in nats (Medusa, 2401.10774, section 2.3.1). Of several longest
    paths the most likely one is chosen. Unlike in `walk`, p is computed for every slot. Returns the
    path's slots, padded with -1, its length, and its last slot.
    """
    batch, count = drafted.tokens.shape
    parents, root = drafted.parent_slots, jnp.zeros(batch, jnp.int32)
    if not count:
        return jnp.full((batch, drafted.depth), -1, jnp.int32), root, root

    def accept_children(
        slot: Int[Array, ""], logp_so_far: Float[Array, "B N"]
    ) -> Float[Array, "B N"]:
        logp = target(jnp.broadcast_to(slot, (batch,)))
        entropy = -jnp.sum(jnp.where(logp > -jnp.inf, jnp.exp(logp) * logp, 0.0), axis=-1)
        least = jnp.minimum(math.log(epsilon), math.log(delta) - entropy)
        drafted_logp = jnp.take_along_axis(logp, drafted.tokens, axis=1)
        accept = drafted.valid & (drafted_logp > least[:, None])
        return jnp.where(parents == slot, jnp.where(accept, drafted_logp, -jnp.inf), logp_so_far)

    node_logp = lax.fori_loop(0, count, accept_children, jnp.full((batch, count), -jnp.inf))

    def extend_path(node: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Add the depth and log-probability of the path to `node`, -inf if it is not accepted."""
        depth, logp = state
        parent = parents[:, node]
        path_logp = pick(logp, parent) + node_logp[:, node]
        return (
            depth.at[:, node + 1].set(pick(depth, parent) + 1),
            logp.at[:, node + 1].set(path_logp),
        )

    depth = jnp.zeros((batch, count + 1), jnp.int32)
    logp = jnp.full((batch, count + 1), -jnp.inf).at[:, 0].set(0.0)
    depth, logp = lax.fori_loop(0, count, extend_path, (depth, logp))
    depth = jnp.where(logp > -jnp.inf, depth, -1)
    accepted = depth.max(axis=1)
    last = jnp.argmax(jnp.where(depth == accepted[:, None], logp, -jnp.inf), axis=1)
    last = last.astype(jnp.int32)
    return path_to(drafted, last)[0], accepted, last


def _first_slot(nodes: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """Return the slot of the first marked node of each row, or 0 if no node is marked."""
    if not nodes.shape[1]:
        return jnp.zeros(nodes.shape[0], jnp.int32)
    return jnp.where(nodes.any(axis=1), 1 + jnp.argmax(nodes, axis=1), 0).astype(jnp.int32)


def _extended(
    path: Int[Array, "B P"],
    depth: Int[Array, "B"],
    slot: Int[Array, "B"],
    extended_rows: Bool[Array, "B"],
) -> Int[Array, "B P"]:
    """Return `path` with `slot[b]` written at index `depth[b]` in the rows b that are extended."""
    new_entry = extended_rows[:, None] & (jnp.arange(path.shape[1])[None, :] == depth[:, None])
    return jnp.where(new_entry, slot[:, None], path)
