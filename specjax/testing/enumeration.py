"""The exact distribution of a rule's output for a drafted tree, by enumeration in float64.

A chain is a tree without branches. For given drafted tokens, a rule's decision is a step function
of each uniform. Bisection finds the steps; every cell between them is visited once and weighted by
its volume. Drafted tokens are weighted by the draft's distribution, and the final token by the
distribution that the rule returns for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from specjax import sampling
from specjax.trees import Topology

CHUNK = 512
BISECTIONS = 54
THIN = 1e-15
TOP = 1 - 2.0**-53

Table = tuple[Float[np.ndarray, "_ V"], ...]
"""Distributions by context: entry d has V**d rows, one per sequence of d earlier tokens.

The first token varies slowest.
"""


Decide = Callable[
    [sampling.Drafted, sampling.Distributions, Float[Array, "drafts N"]],
    tuple[Int[Array, "drafts"], Float[Array, "drafts V"]],
]
"""A function (draft, target, uniforms by node) -> last accepted slot, log-probabilities after it.
"""


class Drafts(NamedTuple):
    """Drafted trees of one shape, with their distributions, groups and weights.

    `logp` and `logq` are the target's and the drafters' log-probabilities by slot; `logq` has W
    rows for each drafter. `drafter` is the drafter that each node was drawn from, or -1 if it was
    not drawn. A group is a set of drafts for which one output distribution is computed: all drafts
    of a sampled distribution, or a single deterministic draft.
    """

    topology: Topology
    drafter: Int[np.ndarray, "N"]
    tokens: Int[np.ndarray, "I N"]
    valid: Bool[np.ndarray, "I N"]
    logp: Float[np.ndarray, "I W V"]
    logq: Float[np.ndarray, "I Q V"]
    group: Int[np.ndarray, "I"]
    weight: Float[np.ndarray, "I"]


class Outcomes(NamedTuple):
    """A rule's decisions by cell of the uniforms: the index of the draft, the volume, the decision.

    `slot` is the last accepted slot, 0 if nothing was accepted; `distribution` is the distribution
    of the next token.
    """

    item: Int[np.ndarray, "cells"]
    volume: Float[np.ndarray, "cells"]
    slot: Int[np.ndarray, "cells"]
    distribution: Float[np.ndarray, "cells V"]


class NotAStepFunction(ValueError):
    """A rule's decision that changes more than once along one of its uniforms."""


def all_tokens(vocab: int, length: int) -> Int[np.ndarray, "I K"]:
    """Return every sequence of `length` tokens, with the first token varying slowest."""
    return np.array(list(itertools.product(range(vocab), repeat=length)), np.int32).reshape(
        vocab**length, length
    )


def contexts(tokens: Int[np.ndarray, "I K"], vocab: int, depth: int) -> Int[np.ndarray, "I"]:
    """Return, for each sequence, the row of a `Table`'s entry `depth` for its first tokens.

    Entry d of a table has a row for each context of d tokens, with the first token varying slowest.
    """
    row = np.zeros(len(tokens), int)
    for column in tokens.T[:depth]:
        row = row * vocab + column
    return row


def slot_contexts(
    topology: Topology, tokens: Int[np.ndarray, "I N"], vocab: int
) -> Int[np.ndarray, "I W"]:
    """Return, for each slot, which row of a `Table`'s entry has the distribution after it.

    The entry is that of the slot's depth, and its row that of the tokens on the path to the slot.
    """
    row = np.zeros((len(tokens), topology.width), int)
    for node, parent in enumerate(topology.parents):
        row[:, node + 1] = row[:, parent] * vocab + tokens[:, node]
    return row


def distributions_by_slot(
    table: Table, topology: Topology, tokens: Int[np.ndarray, "I N"]
) -> Float[np.ndarray, "I W V"]:
    """Return the distribution in `table` after each slot, or a uniform one beyond its depth."""
    vocab = table[0].shape[-1]
    row = slot_contexts(topology, tokens, vocab)
    distributions = np.full((*row.shape, vocab), 1 / vocab)
    for slot, depth in enumerate(topology.depths):
        if depth < len(table):
            distributions[:, slot] = table[depth][row[:, slot]]
    return distributions


def decisions(rule: Decide, drafts: Drafts) -> Outcomes:
    """Return all cells of the uniforms with a constant decision, for every draft.

    Raises NotAStepFunction for a rule whose decision changes more than once along a uniform.
    """
    run = _Run.of(rule, drafts)
    item, low, high = _cells(run, drafts.tokens.shape[1], len(drafts.tokens))
    slot, distribution = run(item, (low + high) / 2)
    elsewhere = low + (high - low) * np.random.default_rng(0).uniform(0.01, 0.99, low.shape)
    if not np.all(_same((slot, distribution), run(item, elsewhere))):
        raise NotAStepFunction
    return Outcomes(item, np.prod(high - low, axis=1), slot, distribution)


def walks(drafts: Drafts) -> Outcomes:
    """Return all outcomes of `sampling.walk`, weighted by the target's probabilities."""
    depth, vocab = drafts.topology.depth, drafts.logp.shape[-1]
    winners = all_tokens(vocab, depth + 1)
    nothing_sampled = drafts._replace(drafter=np.full_like(drafts.drafter, -1))

    @jax.jit
    def run(
        tokens: Int[Array, "drafts N"],
        valid: Bool[Array, "drafts N"],
        winners: Int[Array, "drafts _"],
    ) -> tuple[Int[Array, "drafts"], Int[Array, "drafts _"]]:
        drafted = _drafted(nothing_sampled, tokens, valid, None)
        done = sampling.walk(drafted, lambda slots, depth: sampling.pick(winners, depth))
        return done.next_token, jnp.pad(jnp.maximum(done.path_slots, 0), ((0, 0), (1, 0)))

    item, which = np.divmod(np.arange(len(drafts.tokens) * len(winners)), len(winners))
    next_token, path = _chunked(
        lambda i, w: run(drafts.tokens[i], drafts.valid[i], winners[w]), item, which
    )
    accepted = (path > 0).sum(axis=1)
    # The choice after the last node is never read, so a single one suffices.
    step = np.arange(depth + 1)[None]
    looked_at = step <= accepted[:, None]
    chance = np.exp(drafts.logp[item[:, None], path, winners[which]])
    volume = np.where(looked_at, chance, winners[which] == 0).prod(axis=1)
    kept = volume > 0
    slot = np.take_along_axis(path, accepted[:, None], axis=1)[:, 0]
    return Outcomes(item[kept], volume[kept], slot[kept], np.eye(vocab)[next_token[kept]])


def output_distributions(
    drafts: Drafts, outcomes: Outcomes, tables: list[Table]
) -> Float[np.ndarray, "G outputs"]:
    """Return P(first P+1 output tokens) of each group, completing shorter outputs with p.

    `tables[g]` is the target distribution of group g.
    """
    topology, vocab = drafts.topology, outcomes.distribution.shape[-1]
    weight = outcomes.volume * drafts.weight[outcomes.item]
    accepted = topology.depths[outcomes.slot]
    prefix = slot_contexts(topology, drafts.tokens, vocab)[outcomes.item, outcomes.slot]
    done = np.ones((len(tables), 1))
    for depth in range(topology.depth + 1):
        target = np.stack([table[depth] for table in tables])
        # Outputs that ended earlier continue as p does; before the first token none has ended.
        done = (done[..., None] * target) if depth else np.zeros((len(tables), 1, vocab))
        here = accepted == depth
        group = drafts.group[outcomes.item[here]]
        np.add.at(done, (group, prefix[here]), weight[here, None] * outcomes.distribution[here])
        done = done.reshape(len(tables), -1)
    return done


def target_distributions(tables: list[Table]) -> Float[np.ndarray, "G outputs"]:
    """Return P(first P+1 tokens) of plain decoding for each group."""
    want = np.ones((len(tables), 1))
    for depth in range(len(tables[0])):
        target = np.stack([table[depth] for table in tables])
        want = (want[..., None] * target).reshape(len(tables), -1)
    return want


@dataclass(frozen=True)
class _Run:
    """A compiled rule, called with indices of drafts and uniforms."""

    call: Callable[..., tuple[Array, Array]]
    drafts: Drafts

    @classmethod
    def of(cls, rule: Decide, drafts: Drafts) -> _Run:
        @jax.jit
        def call(
            tokens: Int[Array, "drafts N"],
            valid: Bool[Array, "drafts N"],
            logp: Float[Array, "drafts W V"],
            logq: Float[Array, "drafts Q V"],
            uniforms: Float[Array, "drafts N"],
        ) -> tuple[Int[Array, "drafts"], Float[Array, "drafts V"]]:
            drafted = _drafted(drafts, tokens, valid, logq)
            slot, next_logp = rule(drafted, sampling.by_slot(logp), uniforms)
            return slot, jnp.exp(next_logp)

        return cls(call, drafts)

    def __call__(
        self, item: Int[np.ndarray, "drafts"], uniforms: Float[np.ndarray, "drafts N"]
    ) -> tuple[Int[np.ndarray, "drafts"], Float[np.ndarray, "drafts V"]]:
        drafts = self.drafts
        with jax.enable_x64(True):
            return _chunked(
                lambda i, u: self.call(
                    drafts.tokens[i], drafts.valid[i], drafts.logp[i], drafts.logq[i], u
                ),
                item,
                uniforms,
            )


def _drafted(
    drafts: Drafts,
    tokens: Int[Array, "drafts N"],
    valid: Bool[Array, "drafts N"],
    logq: Float[Array, "drafts Q V"] | None,
) -> sampling.Drafted:
    """Return drafts in the form that rules read.

    A drawn node refers to its drafter's distribution after its parent.
    """
    parents = np.array(drafts.topology.parents, np.int32)
    row = np.where(drafts.drafter >= 0, parents + drafts.topology.width * drafts.drafter, -1)
    row = jnp.broadcast_to(jnp.asarray(row, jnp.int32), tokens.shape)
    depth = drafts.topology.depth
    return sampling.Drafted(tokens, valid, drafts.topology.parents, depth, row, logq)


def _chunked(
    call: Callable[..., tuple[Array, Array]], *arrays: Num[np.ndarray, "drafts ..."]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the two results of `call` over chunks of equal size, so that it compiles once."""
    count = len(arrays[0])
    firsts, seconds = [], []
    for start in range(0, count, CHUNK):
        rows = np.minimum(np.arange(start, start + CHUNK), count - 1)
        first, second = call(*(array[rows] for array in arrays))
        firsts.append(np.asarray(first))
        seconds.append(np.asarray(second))
    return np.concatenate(firsts)[:count], np.concatenate(seconds)[:count]


def _same(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    # The same distribution may differ in its last bits between lanes of a vector unit.
    """Return a mask of equal decisions."""
    close = np.abs(one[1] - other[1]) <= 1e-9
    return (one[0] == other[0]) & np.all(close, axis=-1)


def _cells(
    run: _Run, length: int, count: int
) -> tuple[np.ndarray, Float[np.ndarray, "cells K"], Float[np.ndarray, "cells K"]]:
    """Return draft, lower corner and upper corner of each cell between the rule's steps."""
    steps: list[list[list[float]]] = [[[] for _ in range(length)] for _ in range(count)]
    for axis in range(length):
        for corner in itertools.product((0.0, TOP), repeat=length - 1):
            for item, step in zip(*_steps(run, count, axis, corner), strict=True):
                steps[item][axis].append(step)

    items, lows, highs = [], [], []
    for item, axes in enumerate(steps):
        edges = []
        for found in axes:
            inside = np.sort([x for x in found if THIN < x < 1 - THIN])
            apart = np.diff(inside, prepend=0) > THIN
            edges.append(np.concatenate([[0.0], inside[apart], [1.0]]))
        lows.extend(itertools.product(*(edge[:-1] for edge in edges)))
        highs.extend(itertools.product(*(edge[1:] for edge in edges)))
        items.extend([item] * (len(lows) - len(items)))
    shape = (len(items), length)
    return np.array(items), np.array(lows).reshape(shape), np.array(highs).reshape(shape)


def _steps(
    run: _Run, count: int, axis: int, corner: tuple[float, ...]
) -> tuple[Int[np.ndarray, "steps"], Float[np.ndarray, "steps"]]:
    """Return the drafts and points at which the decision changes along one uniform.

    The other uniforms are fixed at `corner`.
    """

    def at(item: np.ndarray, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        others = np.broadcast_to(np.array(corner, float), (len(item), len(corner)))
        return run(item, np.insert(others, axis, point, axis=1))

    item = np.arange(count)
    start = at(item, np.zeros(count))
    item = item[~_same(start, at(item, np.full(count, TOP)))]
    if not len(item):
        return item, np.zeros(0)
    start = (start[0][item], start[1][item])
    low, high = np.zeros(len(item)), np.full(len(item), TOP)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        before = _same(start, at(item, middle))
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    return item, high
