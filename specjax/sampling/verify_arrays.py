"""Verification of a drafted chain or tree whose distributions are given as arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt

from specjax.sampling import argument_checks as checks
from specjax.sampling.chain_verification import Verification, by_slot
from specjax.sampling.rules import RULES, Rule, Target
from specjax.sampling.tree_verification import Drafted

Keys = Key[Array, "..."] | UInt[Array, "..."] | np.integer | int
ByNode = Sequence[int] | Sequence[Sequence[int]]
"""An integer for each node of a tree, or for each node of each row's tree."""


def verify_chain(
    keys: Keys,
    tokens: Int[Array | np.ndarray, "*B K"],
    logq: Float[Array | np.ndarray, "*B K V"] | None,
    logp: Float[Array | np.ndarray, "*B K+1 V"],
    *,
    positions: Int[Array | np.ndarray, "*B"] | int | None = None,
    rule: str | Rule = "rejection",
    num_valid: Int[Array | np.ndarray, "*B"] | int | None = None,
) -> Verification:
    """Accept a prefix of a drafted chain and draw the token after it, exactly from p.

    The arrays describe one chain, or B chains along a leading axis: one call verifies [K] tokens or
    [B, K]. `logq[..., i, :]` are the log-probabilities that `tokens[..., i]` was drawn from, after
    all warping; None means that the tokens are deterministic. `logp[..., i, :]` are the target's
    warped log-probabilities at the position of `tokens[..., i]`, and `logp[..., K, :]` those at the
    next position. Only the first `num_valid` tokens (by default K) were drafted.

    `keys` has one key per chain; a single key is split. Unless the rule is `coupled`, use these
    keys for nothing else. A key is a result of `jax.random.key`, a legacy key of two words, or an
    integer.

    `rule` is a `Rule` or a name in `RULES`. `coupled` requires `positions`, the absolute position
    of each chain's first drafted token: the noise at a position is `position_gumbel(keys, position,
    V)`, so that plain decoding with the same keys gives the same tokens.

    Returns `num_accepted`, `next_token` and `path_slots`; `Verification.tokens(tokens)` are the
    tokens to emit. Raises ValueError for an unknown rule, missing positions, inconsistent shapes,
    invalid keys and, unless traced, for distributions that are not log-probabilities and for tokens
    that have probability 0 in the distribution they were drawn from.
    """
    tokens, logp, logq = _arrays(tokens, logp, logq)
    rule, length = _rule(rule, positions), tokens.shape[-1] if tokens.ndim else 0
    checks.check_shapes(tokens, logq, logp, length, "K")
    parents = np.arange(length, dtype=np.int32)
    return _verify(keys, tokens, parents, logq, logp, parents, False, rule, positions, num_valid)


def verify_tree(
    keys: Keys,
    tokens: Int[Array | np.ndarray, "*B N"],
    parents: Int[Array | np.ndarray, "*#B N"] | ByNode,
    logq: Float[Array | np.ndarray, "*B Q V"] | None,
    logp: Float[Array | np.ndarray, "*B N+1 V"],
    *,
    logq_row: Int[Array | np.ndarray, "*#B N"] | ByNode | None = None,
    replace: bool = False,
    positions: Int[Array | np.ndarray, "*B"] | int | None = None,
    rule: str | Rule = "rejection",
    num_valid: Int[Array | np.ndarray, "*B"] | int | None = None,
) -> Verification:
    """Accept a path of a drafted token tree and draw the token after it, exactly from p.

    Slot 0 is the root, the last committed token, and slot i + 1 is node i. `parents[..., i]` is the
    slot of node i's parent, so that a chain has the parents 0, 1, 2, ...; parents come before their
    children. `parents` is [N] if all rows have the same shape. `logp[..., s, :]` are the target's
    warped log-probabilities of the token after slot s, and `logq[..., s, :]` those that the
    children of slot s were drawn from, with Q = N + 1; rows of slots without children are ignored.
    If `logq` is None, all nodes are deterministic.

    Siblings must be drawn without replacement and numbered in the order drawn, as by
    `draw_siblings`; with `replace` they were drawn independently, so that two may be equal.
    `logq_row[..., i]` is the row of `logq` that node i was drawn from, before any sibling was
    removed; by default it is the parent's slot, and -1 means that the node is deterministic. With
    `logq_row`, Q is arbitrary.

    The other arguments and the result are as in `verify_chain`; `num_valid` is the number of
    leading nodes that were drafted. Raises ValueError as `verify_chain` does, for a rule that
    verifies chains only and, unless traced, for parents that are not earlier slots, and for equal
    siblings that cannot have been drawn without replacement.
    """
    tokens, logp, logq = _arrays(tokens, logp, logq)
    rule, nodes = _rule(rule, positions), tokens.shape[-1] if tokens.ndim else 0
    checks.check_shapes(tokens, logq, logp, nodes + 1 if logq_row is None else None, "N")
    parents = _node_numbers(parents)
    checks.check_parents(parents, tokens)
    if not rule.takes_trees and not _is_chain(parents):
        raise ValueError(
            f"rule={rule.name!r} verifies chains, whose parents are 0, 1, 2, ...: use rejection, "
            "block, coupled or typical"
        )
    row = parents if logq_row is None else _node_numbers(logq_row)
    if logq_row is not None:
        checks.check_rows(row, tokens, logq)
    return _verify(keys, tokens, parents, logq, logp, row, replace, rule, positions, num_valid)


def _verify(
    keys: Any,
    tokens: Int[Array, "*B N"],
    parents: Int[Array | np.ndarray, "*#B N"],
    logq: Float[Array, "*B Q V"] | None,
    logp: Float[Array, "*B N+1 V"],
    logq_row: Int[Array | np.ndarray, "*#B N"],
    replace: bool,
    rule: Rule,
    positions: Any,
    num_valid: Any,
) -> Verification:
    """Check the values of arrays whose shapes agree, and verify the draft.

    The arguments are those of `verify_tree`. `keys`, `positions` and `num_valid` may still be in
    any form that it accepts.
    """
    for name, distributions in (("logq", logq), ("logp", logp)):
        if distributions is not None:
            checks.check_log_probabilities(name, distributions)
    one_row = tokens.ndim == 1
    batch, nodes = (1, len(tokens)) if one_row else tokens.shape
    vocab = logp.shape[-1]
    keys = checks.one_key_per_row(keys, batch)
    num_valid = checks.one_per_row("num_valid", nodes if num_valid is None else num_valid, batch)
    positions = checks.one_per_row("positions", 0 if positions is None else positions, batch)
    tokens, logp = tokens.reshape(batch, nodes), logp.reshape(batch, nodes + 1, vocab)
    checks.check_tokens(tokens, num_valid, vocab)
    logq_row = jnp.broadcast_to(jnp.atleast_2d(logq_row), (batch, nodes))
    if logq is None:
        logq_row = jnp.full_like(logq_row, -1)
    else:
        logq = logq.reshape(batch, -1, vocab)
        if replace:
            # Repeated independent draws equal single draws, each from a copy of the distribution.
            logq = jnp.take_along_axis(logq, jnp.maximum(logq_row, 0)[:, :, None], axis=1)
            logq_row = jnp.where(logq_row < 0, -1, jnp.arange(nodes)[None, :])
        if rule.needs_logq:
            checks.check_drawn(tokens, num_valid, jnp.atleast_2d(parents), logq_row, logq)
    result = _verify_arrays(
        keys,
        tokens,
        num_valid,
        None if _is_chain(parents) else jnp.atleast_2d(parents),
        logq_row,
        logq,
        logp,
        positions,
        depth=_depth(parents),
        rule=rule,
    )
    return jax.tree.map(lambda array: array[0], result) if one_row else result


@functools.partial(jax.jit, static_argnames=("depth", "rule"))
def _verify_arrays(
    keys: Key[Array, "B"],
    tokens: Int[Array, "B N"],
    num_valid: Int[Array, "B"],
    parents: Int[Array, "#B N"] | None,
    logq_row: Int[Array, "B N"],
    logq: Float[Array, "B Q V"] | None,
    logp: Float[Array, "B N+1 V"],
    positions: Int[Array, "B"],
    *,
    depth: int,
    rule: Rule,
) -> Verification:
    """Verify B rows of checked arrays in one compiled program.

    `parents` is None for a chain, whose shape is then a constant of the program.
    """
    valid = jnp.arange(tokens.shape[1])[None, :] < num_valid[:, None]
    shape = tuple(range(tokens.shape[1])) if parents is None else parents
    drafted = Drafted(tokens, valid, shape, depth, logq_row, logq)
    return rule.verify(keys, drafted, Target(by_slot(logp), positions, logp.shape[2], logp.dtype))


def _arrays(tokens: Any, logp: Any, logq: Any) -> tuple[Array, Array, Array | None]:
    return jnp.asarray(tokens), jnp.asarray(logp), None if logq is None else jnp.asarray(logq)


def _node_numbers(values: Any) -> Array | np.ndarray:
    """Return `values` as a NumPy array, whose entries can be read, or unchanged if traced."""
    return values if checks.is_traced(values) else np.asarray(values)


def _is_chain(parents: Int[Array | np.ndarray, "*#B N"]) -> bool:
    """Return whether node i is known to follow node i - 1 in every row; False if traced."""
    return not checks.is_traced(parents) and bool(
        np.all(parents == np.arange(parents.shape[-1]).reshape((1,) * (parents.ndim - 1) + (-1,)))
    )


def _depth(parents: Int[Array | np.ndarray, "*#B N"]) -> int:
    """Return the number of nodes on the longest path, or its upper bound N if traced."""
    if checks.is_traced(parents):
        return parents.shape[-1]
    depths = np.zeros((*parents.shape[:-1], parents.shape[-1] + 1), int)
    for node in range(parents.shape[-1]):
        parent = parents[..., node : node + 1]
        depths[..., node + 1] = 1 + np.take_along_axis(depths, parent, axis=-1)[..., 0]
    return int(depths.max(initial=0))


def _rule(rule: str | Rule, positions: Any) -> Rule:
    """Return the rule called `rule`, or `rule` itself if it is a Rule.

    Raises ValueError for any other value, and if the rule needs `positions` but they are None.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"rule={rule!r} is unknown: use one of {', '.join(RULES)}, or a Rule")
        rule = RULES[rule]
    if not isinstance(rule, Rule):
        raise ValueError(f"rule={rule!r}: use one of {', '.join(RULES)}, or a value of a Rule")
    if rule.position_noise and positions is None:
        raise ValueError(
            f"rule={rule.name!r} needs positions: pass those of the first drafted tokens"
        )
    return rule
