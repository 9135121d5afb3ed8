"""Block verification of a tree: its paths are verified together, from the leaves to the root.

Let the walk be about to test the subtree of a node with *weight* w, the probability with which it
shall end there. With the node's distribution p, the measure w p is passed to its children in the
order drawn. Child x, drawn from q, takes the weight min(1, w p(x) / q(x)); what is left is
norm(max(0, w p - q)), now with the weight r / (r + 1 - w), where r is the sum of max(0, w p - q).
What the last child leaves is accepted at the node itself. All weights follow from p, q and the
tokens; only then are uniforms used, each in one test. docs/sampling.md has the proof.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from specjax.sampling.chain_verification import (
    Distributions,
    block_height,
    next_block_weight,
    pick,
)
from specjax.sampling.distributions import excess, log_ratio
from specjax.sampling.tree_verification import (
    Drafted,
    Recursion,
    next_child,
    node_distribution,
    path_to,
)


def multipath_block(
    drafted: Drafted, target: Distributions, uniforms: Float[Array, "B N"]
) -> Recursion:
    """Apply block verification to a tree; on average it accepts no fewer tokens than `recursion`.

    The nodes are tested in postorder: those below a node first, siblings in the order drawn. The
    first node with u < h ends the path, where u is its uniform and h its height (`block_weights`);
    the root ends it otherwise. The next token is distributed as what the children of the last node
    leave. On a chain this equals `chain_verification.block`. (Sun et al. 2403.10444; bottom-up on
    trees: Weng et al. 2505.12398.)
    """
    logw, heights = block_weights(drafted, target)
    passes = drafted.valid & (uniforms < heights[:, 1:])
    last = _first_in_postorder(drafted, passes)
    path, accepted = path_to(drafted, last)
    return Recursion(path, accepted, _over_children(drafted, target, last, pick(logw, last))[2])


def block_weights(
    drafted: Drafted, target: Distributions
) -> tuple[Float[Array, "B W"], Float[Array, "B W"]]:
    """Return log w and the height h of each slot.

    Given that the walk tests the subtree of a slot at all, it ends there with probability w, and it
    ends at the slot itself with probability h if all of the slot's children were refused. Both are
    1 at the root. The distributions of slots without children, or with w = 0 in all rows, are not
    computed.
    """
    batch, nodes = drafted.tokens.shape
    dtype = jax.eval_shape(target, jnp.zeros(batch, jnp.int32)).dtype
    slots = jnp.arange(nodes + 1)[None, :]
    logw = jnp.broadcast_to(jnp.where(slots == 0, 0.0, -jnp.inf).astype(dtype), (batch, nodes + 1))

    def visit(slot: Int[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
        logw, heights = state
        slot = jnp.broadcast_to(slot, (batch,)).astype(jnp.int32)
        weight = pick(logw, slot)
        parent = next_child(drafted, slot, jnp.zeros_like(slot)) > 0
        child_logw, height = lax.cond(
            jnp.any(parent & (weight > -jnp.inf)),
            lambda: _over_children(drafted, target, slot, weight)[:2],
            lambda: (jnp.full((batch, nodes), -jnp.inf, dtype), jnp.exp(weight)),
        )
        logw = logw.at[:, 1:].max(child_logw)
        return logw, jnp.where(slots == slot[:, None], height[:, None], heights)

    return lax.fori_loop(0, nodes + 1, visit, (logw, jnp.exp(logw)))


class Passed(NamedTuple):
    """What a child takes of its parent's weight, and what it leaves if it is refused.

    `child_logw` is log w of the child. `logp` and `weight` are the parent's distribution and weight
    for its next child, or, after the last one, the distribution of the next token and the height.
    """

    child_logw: Float[Array, "B"]
    logp: Float[Array, "B V"]
    weight: Float[Array, "B"]


def pass_weight(
    logp: Float[Array, "B V"],
    logw: Float[Array, "B"],
    logq: Float[Array, "B V"],
    token: Int[Array, "B"],
    takes_all: Bool[Array, "B"],
) -> Passed:
    """Pass a weight to one child per row.

    `logp` and `logw` are the parent's log-probabilities and log w, after its earlier children;
    `token` was drawn from `logq`. A child that takes all gets the weight min(1, w p / q), any other
    one w min(1, p / q), after which w' = (w - w_child) / (1 - w_child) stays with norm(max(0, p -
    q)).
    """
    odds = log_ratio(pick(logp, token), pick(logq, token))
    share = logw + next_block_weight(jnp.zeros_like(logw), odds)
    left = excess(logp + jnp.where(takes_all, logw, 0)[:, None], logq)
    log_mass = logsumexp(left, axis=-1)
    has_mass = log_mass > -jnp.inf
    left -= jnp.where(has_mass, log_mass, 0)[:, None]
    refused = -jnp.expm1(share)
    kept = (jnp.exp(logw) - jnp.exp(share)) / jnp.where(refused > 0, refused, 1)
    kept = jnp.where(refused > 0, kept, 1)
    all_left = block_height(log_mass, logw, jnp.zeros_like(has_mass))
    return Passed(
        jnp.where(takes_all, next_block_weight(logw, odds), share),
        jnp.where(has_mass[:, None], left, logp),
        jnp.where(takes_all, all_left, kept),
    )


def _over_children(
    drafted: Drafted, target: Distributions, slots: Int[Array, "B"], logw: Float[Array, "B"]
) -> tuple[Float[Array, "B N"], Float[Array, "B"], Float[Array, "B V"]]:
    """Pass the weight of one slot per row to its children, and return what they take and leave.

    Returns log w of the children by node (-inf for other nodes), the height of the slot, and the
    log-probabilities of the token after it if it ends the path.
    """
    full = takes_all(drafted)
    nodes = jnp.arange(drafted.tokens.shape[1])[None, :]

    def visit(state: tuple[Array, ...]) -> tuple[Array, ...]:
        child, logp, logw, height, child_logw = state
        waiting = child > 0
        node = jnp.maximum(child - 1, 0)
        logq = node_distribution(drafted, node, logp.shape[1], logp.dtype)
        token = pick(drafted.tokens, node)
        passed = pass_weight(logp, logw, logq, token, pick(full, node))
        is_node = waiting[:, None] & (nodes == node[:, None])
        return (
            jnp.where(waiting, next_child(drafted, slots, child), 0),
            jnp.where(waiting[:, None], passed.logp, logp),
            jnp.where(waiting, jnp.log(passed.weight), logw),
            jnp.where(waiting, passed.weight, height),
            jnp.where(is_node, passed.child_logw[:, None], child_logw),
        )

    nothing = jnp.full(drafted.tokens.shape, -jnp.inf, logw.dtype)
    first = next_child(drafted, slots, jnp.zeros_like(slots))
    state = (first, target(slots), logw, jnp.exp(logw), nothing)
    _, logp, _, height, child_logw = lax.while_loop(
        lambda state: jnp.any(state[0] > 0), visit, state
    )
    return child_logw, height, logp


def _first_in_postorder(drafted: Drafted, passes: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """Return the slot of the first node in postorder that passes, or 0 if none does."""
    batch, nodes = passes.shape
    parents = drafted.parent_slots

    def visit(step: Int[Array, ""], found: Int[Array, "B W"]) -> Int[Array, "B W"]:
        """Give the parent of a node what was found in the node's subtree; earlier siblings win."""
        slot = nodes - step
        below = found[:, slot]
        here = jnp.where(below > 0, below, jnp.where(passes[:, slot - 1], slot, 0))
        to_parent = jnp.arange(nodes + 1)[None, :] == parents[:, slot - 1, None]
        return jnp.where(to_parent & (here > 0)[:, None], here[:, None], found)

    found = jnp.zeros((batch, nodes + 1), jnp.int32)
    return lax.fori_loop(0, nodes, visit, found)[:, 0]


def takes_all(drafted: Drafted) -> Bool[Array, "B N"]:
    """Return which nodes take all of w p that their q allows; other ones take w min(p, q).

    What a child takes beyond w min(p, q) is lost to its later siblings. That pays if their subtrees
    are no larger, so that no tree accepts fewer tokens than by `recursion`. A node's share must not
    depend on tokens, but a shape that is chosen on the device may: there, every node takes all.
    """
    shape = drafted.whole
    if shape is None and isinstance(drafted.parents, tuple):
        shape = drafted.parents
    nodes = drafted.tokens.shape[1]
    nested = np.ones(nodes, bool) if shape is None else _nested(shape)[:nodes]
    return jnp.broadcast_to(jnp.asarray(nested)[None], drafted.tokens.shape)


@functools.lru_cache(maxsize=64)
def _nested(parents: tuple[int, ...]) -> np.ndarray:
    """Return for each node whether its subtree and those of its later siblings are nested.

    That is, each of them contains the next one, child by child.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node + 1)

    def contains(one: int, other: int) -> bool:
        pairs = zip(children[one], children[other], strict=False)
        return len(children[one]) >= len(children[other]) and all(contains(*pair) for pair in pairs)

    nested = np.ones(len(parents), bool)
    for siblings in children:
        for place in reversed(range(len(siblings) - 1)):
            first, second = siblings[place : place + 2]
            nested[first - 1] = nested[second - 1] and contains(first, second)
    return nested
