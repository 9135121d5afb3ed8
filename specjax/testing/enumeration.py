"""The distribution of what a chain rule emits, computed exactly: no sampling, float64.

A rule is a function of uniforms, and for given drafted tokens a step function of each. Bisection
finds the steps, every cell between them is visited once and weighs its volume. The tokens are
weighted by the draft's distribution, the final token by the distribution that the rule gives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from specjax import sampling

CHUNK = 4096
BISECTIONS = 54
THIN = 1e-15
TOP = 1 - 2.0**-53

Table = tuple[Float[np.ndarray, "_ V"], ...]
"""Distributions by context: entry d has V**d rows, one per d earlier tokens, the first slowest."""


Decide = Callable[..., sampling.Decision]
"""`UniformRule.decide` of a rule."""


class Drafts(NamedTuple):
    """Drafted chains, their distributions, and the group each belongs to, with its weight.

    A group is what one distribution of outputs is computed for: all drafts of a sampled
    distribution together, or one deterministic draft alone.
    """

    tokens: Int[np.ndarray, "I K"]
    num_valid: Int[np.ndarray, "I"]
    logp: Float[np.ndarray, "I K+1 V"]
    logq: Float[np.ndarray, "I K V"]
    group: Int[np.ndarray, "I"]
    weight: Float[np.ndarray, "I"]


class Outcomes(NamedTuple):
    """What a rule does in its cells: the draft, the cell's volume, and the decision in it."""

    item: Int[np.ndarray, "cells"]
    volume: Float[np.ndarray, "cells"]
    num_accepted: Int[np.ndarray, "cells"]
    distribution: Float[np.ndarray, "cells V"]


class NotAStepFunction(ValueError):
    """A rule's decision changes more than once in one of its uniforms."""


def all_tokens(vocab: int, length: int) -> Int[np.ndarray, "I K"]:
    """Every sequence of `length` tokens, the first token slowest."""
    return np.array(list(itertools.product(range(vocab), repeat=length)), np.int32).reshape(
        vocab**length, length
    )


def contexts(tokens: Int[np.ndarray, "I K"], vocab: int, depth: int) -> Int[np.ndarray, "I"]:
    """The row of a table's entry `depth` that the first `depth` tokens of each sequence name."""
    row = np.zeros(len(tokens), int)
    for column in tokens.T[:depth]:
        row = row * vocab + column
    return row


def distributions_along(
    table: Table, tokens: Int[np.ndarray, "I K"], count: int
) -> Float[np.ndarray, "I N V"]:
    """The first `count` distributions that each sequence of tokens meets."""
    vocab = table[0].shape[-1]
    distributions = [table[depth][contexts(tokens, vocab, depth)] for depth in range(count)]
    return np.stack(distributions, axis=1) if distributions else np.zeros((len(tokens), 0, vocab))


def decisions(rule: Decide, drafts: Drafts) -> Outcomes:
    """Every cell of the uniforms on which the rule decides alike, for every draft."""
    run = _Run.of(rule, drafts)
    item, low, high = _cells(run, drafts.tokens.shape[1], len(drafts.tokens))
    num_accepted, distribution = run(item, (low + high) / 2)
    elsewhere = low + (high - low) * np.random.default_rng(0).uniform(0.01, 0.99, low.shape)
    if not np.all(_same((num_accepted, distribution), run(item, elsewhere))):
        raise NotAStepFunction
    return Outcomes(item, np.prod(high - low, axis=1), num_accepted, distribution)


def walks(drafts: Drafts) -> Outcomes:
    """Every outcome of `sampling.walk`: noise that makes a token win, as often as p draws it."""
    length, vocab = drafts.tokens.shape[1], drafts.logp.shape[-1]
    winners = all_tokens(vocab, length + 1)

    @jax.jit
    def run(
        tokens: Int[Array, "R K"],
        num_valid: Int[Array, "R"],
        logp: Float[Array, "R K+1 V"],
        winners: Int[Array, "R K+1"],
    ) -> sampling.Verification:
        noise = jnp.where(winners[:, :, None] == jnp.arange(vocab)[None, None, :], 0.0, -jnp.inf)
        target, wins = sampling.by_slot(logp), sampling.by_slot(noise)
        return sampling.walk(
            sampling.chain_drafted(tokens, num_valid),
            lambda slots, depth: sampling.argmax(target(slots) + wins(depth)),
        )

    # What would win after the last valid node is never looked at: one choice stands for all.
    looked_at = np.arange(length + 1) <= drafts.num_valid[:, None]
    chosen = winners[None] * looked_at[:, None] == winners[None]
    item, which = np.nonzero(chosen.all(axis=-1))
    slot = np.arange(length + 1)
    chance = np.exp(drafts.logp[item[:, None], slot[None], winners[which]])
    volume = np.where(looked_at[item], chance, 1.0).prod(axis=1)
    item, which, volume = item[volume > 0], which[volume > 0], volume[volume > 0]
    with jax.enable_x64(True):
        num_accepted, next_token = _chunked(
            lambda i, w: run(drafts.tokens[i], drafts.num_valid[i], drafts.logp[i], winners[w])[1:],
            item,
            which,
        )
    return Outcomes(item, volume, num_accepted, np.eye(vocab)[next_token])


def output_distributions(
    drafts: Drafts, outcomes: Outcomes, tables: list[Table]
) -> Float[np.ndarray, "G outputs"]:
    """P(first K+1 tokens that come out) of each group, shorter outputs completed with p.

    `tables[g]` is group g's target distribution.
    """
    length, vocab = drafts.tokens.shape[1], outcomes.distribution.shape[-1]
    weight = outcomes.volume * drafts.weight[outcomes.item]
    done = np.ones((len(tables), 1))
    for depth in range(length + 1):
        target = np.stack([table[depth] for table in tables])
        # Outputs that ended earlier go on as p does; before the first token none has ended.
        done = (done[..., None] * target) if depth else np.zeros((len(tables), 1, vocab))
        here = outcomes.num_accepted == depth
        item = outcomes.item[here]
        prefix = contexts(drafts.tokens[item], vocab, depth)
        np.add.at(
            done, (drafts.group[item], prefix), weight[here, None] * outcomes.distribution[here]
        )
        done = done.reshape(len(tables), -1)
    return done


def target_distributions(tables: list[Table]) -> Float[np.ndarray, "G outputs"]:
    """P(first K+1 tokens) of plain decoding, group by group."""
    want = np.ones((len(tables), 1))
    for depth in range(len(tables[0])):
        target = np.stack([table[depth] for table in tables])
        want = (want[..., None] * target).reshape(len(tables), -1)
    return want


@dataclass(frozen=True)
class _Run:
    """A rule, compiled, on the drafts that an index names."""

    call: Callable[..., tuple[Array, Array]]
    drafts: Drafts

    @classmethod
    def of(cls, rule: Decide, drafts: Drafts) -> _Run:
        @jax.jit
        def call(
            tokens: Int[Array, "R K"],
            num_valid: Int[Array, "R"],
            logp: Float[Array, "R K+1 V"],
            logq: Float[Array, "R K V"],
            uniforms: Float[Array, "R K"],
        ) -> tuple[Int[Array, "R"], Float[Array, "R V"]]:
            target, draft = sampling.by_slot(logp), sampling.by_slot(logq)
            decision = rule(tokens, num_valid, target, draft, uniforms)
            return decision.num_accepted, jnp.exp(decision.next_logp)

        return cls(call, drafts)

    def __call__(
        self, item: Int[np.ndarray, "R"], uniforms: Float[np.ndarray, "R K"]
    ) -> tuple[Int[np.ndarray, "R"], Float[np.ndarray, "R V"]]:
        drafts = self.drafts
        with jax.enable_x64(True):
            return _chunked(
                lambda i, u: self.call(
                    drafts.tokens[i], drafts.num_valid[i], drafts.logp[i], drafts.logq[i], u
                ),
                item,
                uniforms,
            )


def _chunked(
    call: Callable[..., tuple[Array, Array]], *arrays: Num[np.ndarray, "R ..."]
) -> tuple[np.ndarray, np.ndarray]:
    """The two results of `call`, asked for in chunks of one size so that it compiles once."""
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
    close = np.abs(one[1] - other[1]) <= 1e-9
    return (one[0] == other[0]) & np.all(close, axis=-1)


def _cells(
    run: _Run, length: int, count: int
) -> tuple[np.ndarray, Float[np.ndarray, "cells K"], Float[np.ndarray, "cells K"]]:
    """Draft, lower and upper corner of each box between the steps of the rule."""
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
    """Where the decision changes along one uniform, the others held at a corner: drafts, points."""

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
