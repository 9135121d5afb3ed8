"""Verification rules of drafted trees in NumPy, by closed formulas instead of random draws.

For each draft a rule gives the probability that the path ends at each slot, and the distribution of
the token after it. These are computations of their own, beside which tests put the rules of
`specjax.sampling`, and of rules that specjax does not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax import sampling
from specjax.sampling import multipath
from specjax.testing.enumeration import (
    Drafts,
    Outcomes,
    all_tokens,
    distributions_by_slot,
)
from specjax.testing.rule_check import DistributionPair, draw_weights
from specjax.trees import Topology


class Trees(NamedTuple):
    """Drafted trees of one shape, given by the slots of the parents.

    `p` are the target's distributions by slot. Node i was drawn from `q[:, i]`, from which earlier
    siblings are already removed if the draws were without replacement. Siblings are tested in the
    order of their slots, unless `turns` has another number for each node to sort them by.
    """

    parents: tuple[int, ...]
    tokens: Int[np.ndarray, "I N"]
    valid: Bool[np.ndarray, "I N"]
    p: Float[np.ndarray, "I W V"]
    q: Float[np.ndarray, "I N V"]
    turns: tuple[int, ...] | None = None

    def children(self, slot: int) -> list[int]:
        """Return the slots of the children of `slot`, in the order in which they are tested."""
        slots = [child for child, parent in enumerate(self.parents, start=1) if parent == slot]
        return slots if self.turns is None else sorted(slots, key=lambda s: self.turns[s - 1])

    def odds(self, child: int, p: Float[np.ndarray, "I V"]) -> Float[np.ndarray, "I"]:
        """Return p(x) / q(x) of the token x in slot `child`; 0 if q(x) is 0 or there is no node."""
        token = self.tokens[:, child - 1, None]
        of_p, of_q = (
            np.take_along_axis(each, token, axis=1)[:, 0] for each in (p, self.q[:, child - 1])
        )
        possible = self.valid[:, child - 1] & (of_q > 0)
        return np.where(possible, of_p / np.where(of_q > 0, of_q, 1), 0.0)


class Ends(NamedTuple):
    """The probability that the path ends at each slot, and the distribution of the next token."""

    probability: Float[np.ndarray, "I W"]
    distribution: Float[np.ndarray, "I W V"]

    @classmethod
    def none(cls, trees: Trees) -> Ends:
        """Return ends of probability 0 everywhere, to be filled in."""
        return cls(np.zeros(trees.p.shape[:2]), trees.p.copy())

    def lengths(self, topology: Topology) -> Float[np.ndarray, "I"]:
        """Return the expected number of accepted tokens of each draft."""
        return self.probability @ topology.depths

    def outcomes(self) -> Outcomes:
        """Return the ends in the form in which a rule's decisions are enumerated."""
        item, slot = np.nonzero(self.probability)
        return Outcomes(item, self.probability[item, slot], slot, self.distribution[item, slot])


def drawn_trees(
    topology: Topology, pairs: Sequence[DistributionPair], *, replace: bool = False
) -> Drafts:
    """Return every draft of a shape that the q of each pair can draw; group g is of `pairs[g]`.

    Siblings are drawn without replacement, or independently with `replace`.
    """
    parents, arrays = topology.parents, []
    # Independent draws are those of a drafter each, all with the same q.
    rank = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    drafter = np.array(rank if replace else [0] * len(parents))
    for group, pair in enumerate(pairs):
        vocab = pair.p[0].shape[-1]
        tokens = all_tokens(vocab, topology.num_nodes)
        p, q = (distributions_by_slot(table, topology, tokens) for table in (pair.p, pair.q))
        q = np.stack([q] * (drafter.max() + 1), axis=1)
        weight, possible = draw_weights(topology, drafter, tokens, q)
        with np.errstate(divide="ignore"):
            logp, logq = np.log(p), np.log(q.reshape(len(tokens), -1, vocab))
        every = tokens, possible, logp, logq, np.full(len(tokens), group), weight
        arrays.append([array[weight > 0] for array in every])
    return Drafts(topology, drafter, *(np.concatenate(each) for each in zip(*arrays, strict=True)))


def trees_of(drafts: Drafts) -> Trees:
    """Return enumerated drafts, all nodes of which are drawn, as trees."""
    parents = np.array(drafts.topology.parents)
    rows = parents + drafts.topology.width * drafts.drafter
    return with_draws(
        drafts.topology.parents, drafts.tokens, drafts.valid, np.exp(drafts.logp), drafts.logq, rows
    )


def with_draws(
    parents: tuple[int, ...],
    tokens: Int[np.ndarray, "I N"],
    valid: Bool[np.ndarray, "I N"],
    p: Float[np.ndarray, "I W V"],
    logq: Float[np.ndarray, "I Q V"],
    rows: Int[np.ndarray, "N"],
) -> Trees:
    """Return trees whose node i was drawn from `logq[:, rows[i]]`, without replacement per row."""
    q = np.exp(logq)[:, rows]
    for before, node in itertools.combinations(range(len(parents)), 2):
        if parents[node] == parents[before] and rows[node] == rows[before]:
            np.put_along_axis(q[:, node], tokens[:, before, None], 0.0, axis=1)
    return Trees(parents, tokens, valid, p, normalized(q, 0.0))


def largest_first(trees: Trees) -> Trees:
    """Return trees whose siblings are tested in the order of their subtrees' sizes, largest first.

    What a sibling was drawn from, given those that are now tested before it, follows from the
    probability of all siblings together, which is that of the draws in their own order.
    """
    nodes, vocab = len(trees.parents), trees.p.shape[-1]
    sizes = np.ones(nodes + 1, int)
    for node in reversed(range(nodes)):
        sizes[trees.parents[node]] += sizes[node + 1]
    q = trees.q.copy()
    for slot in range(nodes + 1):
        drawn = trees.children(slot)
        for count in range(2, len(drawn) + 1):
            # Where q has too few tokens, the siblings drawn last are missing.
            items = trees.valid[:, [child - 1 for child in drawn]].sum(axis=1) == count
            siblings = drawn[:count]
            tested = sorted(siblings, key=lambda child: -sizes[child])
            joint = _joint(trees, siblings, items)
            joint = np.moveaxis(joint, [1 + siblings.index(c) for c in tested], range(1, count + 1))
            at = np.arange(len(joint))
            for turn, child in enumerate(tested):
                later = tuple(range(2, 1 + count - turn))
                q[items, child - 1] = normalized(joint.sum(axis=later), 1 / vocab)
                joint = joint[at, trees.tokens[items, child - 1]]
    return trees._replace(q=q, turns=tuple((-sizes[1:]).tolist()))


def likelier_first(trees: Trees) -> Trees:
    """Return trees in which a sibling with p > q is tested before one with p <= q.

    Siblings are taken two at a time, in the order drawn, where their subtrees have the same shape:
    then the two change places if only the second one has p > q. Here p is what is left after the
    siblings before them, and q what the first of the two was drawn from. What the two were drawn
    from follows from the probability of both, as in `largest_first`.
    """
    tokens, valid, p, q = (array.copy() for array in trees[1:5])
    trees = trees._replace(tokens=tokens, valid=valid, p=p, q=q)
    for slot in range(len(trees.parents) + 1):
        left, waiting = p[:, slot], trees.children(slot)
        while waiting:
            first, *waiting = waiting
            places = _same_places(trees, first, waiting[0]) if waiting else []
            if places:
                second, *waiting = waiting
                both = valid[:, second - 1]
                better = (left > q[:, first - 1])[both]
                rows = np.arange(len(better))
                base = q[both, first - 1]
                # With independent draws, the second one has the q of the first one.
                replace = np.array_equal(base, q[both, second - 1])
                of_first, of_second = (
                    better[rows, tokens[both, child - 1]] for child in (first, second)
                )
                changed = np.flatnonzero(both)[of_second & ~of_first]
                for place, other in places:
                    for array, at, to in (
                        (tokens, place - 1, other - 1),
                        (valid, place - 1, other - 1),
                        (q, place - 1, other - 1),
                        (p, place, other),
                    ):
                        swapped = array[changed, to].copy()
                        array[changed, to] = array[changed, at]
                        array[changed, at] = swapped
                q[both, first - 1], q[both, second - 1] = _pair_distributions(
                    base, better, tokens[both, first - 1], replace
                )
                pair = [first, second]
            else:
                pair = [first]
            for child in pair:
                left = np.where(valid[:, child - 1, None], excess(left, q[:, child - 1]), left)
    return trees


def _pair_distributions(
    base: Float[np.ndarray, "I V"],
    better: Bool[np.ndarray, "I V"],
    first: Int[np.ndarray, "I"],
    replace: bool,
) -> tuple[Float[np.ndarray, "I V"], Float[np.ndarray, "I V"]]:
    """Return what two siblings were drawn from, if `better` tokens are tested before others.

    Both were drawn from `base`. These are the distribution of the token that is tested first, and,
    given that it is `first`, that of the other one.
    """
    at = np.arange(len(base)), first
    # P(x, then y) is base_x base_y / left_x.
    left = np.ones_like(base) if replace else np.where(base < 1, 1 - base, 1)
    worse = np.where(better, 0.0, base)
    possible = worse.sum(axis=1, keepdims=True) - (0 if replace else worse)
    before = (worse / left).sum(axis=1, keepdims=True)
    of_first = np.where(better, base * (1 + before), base * possible / left)
    allowed = ~better | better[at][:, None]
    of_second = np.where(allowed, base / left[at][:, None], 0.0)
    of_second += np.where(better[at][:, None] & ~better, base / left, 0.0)
    if not replace:
        of_second[at] = 0.0
    return of_first, normalized(of_second, 0.0)


def _same_places(trees: Trees, first: int, second: int) -> list[tuple[int, int]]:
    """Return the slots of two subtrees of the same shape side by side, or [] for other shapes."""
    below = trees.children(first), trees.children(second)
    if len(below[0]) != len(below[1]):
        return []
    places = [(first, second)]
    for child, other in zip(*below, strict=True):
        found = _same_places(trees, child, other)
        if not found:
            return []
        places += found
    return places


def _joint(
    trees: Trees, siblings: Sequence[int], items: Bool[np.ndarray, "I"]
) -> Float[np.ndarray, "items ..."]:
    """Return P(tokens of `siblings`) with one axis of tokens for each, in the order drawn."""
    base = trees.q[items, siblings[0] - 1]
    # With independent draws, the second one has the q of the first one.
    replace = np.array_equal(base, trees.q[items, siblings[1] - 1])
    joint = np.zeros((len(base), *[base.shape[1]] * len(siblings)))
    for tokens in itertools.product(range(base.shape[1]), repeat=len(siblings)):
        left, chance = base, np.ones(len(base))
        for token in tokens:
            chance = chance * left[:, token]
            if not replace:
                left = left.copy()
                left[:, token] = 0.0
                left = normalized(left, 0.0)
        joint[(slice(None), *tokens)] = chance
    return joint


def takes_all(topology: Topology) -> Bool[np.ndarray, "N"]:
    """Return which nodes take all of their parent's weight that q allows, under `block`."""
    tokens = jnp.zeros((1, topology.num_nodes), jnp.int32)
    drafted = sampling.Drafted(
        tokens, tokens == 0, topology.parents, topology.depth, tokens, logq=None
    )
    return np.asarray(multipath.takes_all(drafted))[0]


def rejection(trees: Trees) -> Ends:
    """Return the ends of `sampling.recursion`, which tests children from the root on."""
    ends = Ends.none(trees)
    ends.probability[:, 0] = 1.0
    for slot in range(len(trees.parents) + 1):
        left = trees.p[:, slot]
        for child in trees.children(slot):
            accepted = np.minimum(trees.odds(child, left), 1.0)
            ends.probability[:, child] = ends.probability[:, slot] * accepted
            ends.probability[:, slot] *= 1 - accepted
            tested = trees.valid[:, child - 1, None]
            left = np.where(tested, excess(left, trees.q[:, child - 1]), left)
        ends.distribution[:, slot] = left
    return ends


def leaf_first(trees: Trees, takes_all: Bool[np.ndarray, "N"] | bool) -> Ends:
    """Return the ends of rules that test nodes from the leaves to the root.

    If every node takes all of w p that its q allows, this is Traversal Verification (Weng et al.
    2505.12398, algorithm 2); if those nodes do that `sampling.multipath.takes_all` marks, it is
    `sampling.multipath_block`.
    """
    ends = Ends.none(trees)
    takes_all = np.broadcast_to(takes_all, len(trees.parents))
    weights = np.zeros_like(ends.probability)
    weights[:, 0] = 1.0
    for slot in range(len(trees.parents) + 1):
        weight, left = weights[:, slot], trees.p[:, slot]
        for child in trees.children(slot):
            q, tested = trees.q[:, child - 1], trees.valid[:, child - 1]
            odds = trees.odds(child, left)
            if takes_all[child - 1]:
                weights[:, child] = np.minimum(weight * odds, 1.0)
                mass = np.maximum(weight[:, None] * left - q, 0).sum(axis=1)
                kept = _ratio(mass, mass + 1 - weight, 1.0)
                beyond = excess(weight[:, None] * left, q, left)
            else:
                weights[:, child] = weight * np.minimum(odds, 1.0)
                kept = _ratio(weight - weights[:, child], 1 - weights[:, child], 1.0)
                beyond = excess(left, q)
            weight = np.where(tested, kept, weight)
            left = np.where(tested[:, None], beyond, left)
        weights[:, slot] = weight  # from here on, the height
        ends.distribution[:, slot] = left
    refused = np.ones(len(trees.tokens))
    for slot in _postorder(trees, 0):
        ends.probability[:, slot] = refused * weights[:, slot]
        refused = refused * (1 - weights[:, slot])
    return ends


def hierarchical(trees: Trees, *, capped: bool = True) -> Ends:
    """Return the ends of Hierarchical Speculative Decoding (Zhou et al. 2601.05724).

    The path of first children is verified as a chain, by joint probabilities: after i tokens let
    r_i = p(x_1..x_i) / q(x_1..x_i), divided by the largest of 1, r_1, .., r_i. From the end of the
    chain, verification steps back unless u < D(p, q) / D(q, p), where D(p, q) is the sum of max(0,
    r_i p - q) over the vocabulary and D(q, p) that of max(0, q - r_i p). Where it stops, the next
    path of the tree is verified likewise against what is left of p there. With `capped` False, r_i
    is min(1, p(x_1..x_i) / q(x_1..x_i)), which is not exact.
    """
    ends = Ends.none(trees)

    def verify(
        start: int,
        children: Sequence[int],
        left: Float[np.ndarray, "I V"],
        reached: Float[np.ndarray, "I"],
    ) -> None:
        """Add the ends at `start` and below `children`, given how often `start` is reached."""
        chain, waiting = [start], [list(children)]
        while waiting[-1]:
            chain.append(waiting[-1].pop(0))
            waiting.append(trees.children(chain[-1]))
        p = [left, *(trees.p[:, slot] for slot in chain[1:])]
        joint = largest = ratio = np.ones_like(reached)
        stops, residuals = [], []
        for step, slot in enumerate(chain):
            if step:
                joint = joint * trees.odds(slot, p[step - 1])
                largest = np.maximum(largest, joint)
                ratio = joint / largest if capped else np.minimum(joint, 1.0)
            if step == len(chain) - 1:
                stops.append(ratio)
                residuals.append(p[step])
                continue
            child = chain[step + 1]
            difference = ratio[:, None] * p[step] - trees.q[:, child - 1]
            more, less = (np.maximum(side, 0).sum(axis=1) for side in (difference, -difference))
            last = ~trees.valid[:, child - 1]
            stops.append(np.where(last, ratio, _ratio(more, np.maximum(more, less), 1.0)))
            beyond = normalized(np.maximum(difference, 0), p[step])
            residuals.append(np.where(last[:, None], p[step], beyond))
        for step in reversed(range(len(chain))):
            here = reached * stops[step]
            reached = reached * (1 - stops[step])
            if waiting[step]:
                verify(chain[step], waiting[step], residuals[step], here)
            else:
                ends.probability[:, chain[step]] = here
                ends.distribution[:, chain[step]] = residuals[step]

    verify(0, trees.children(0), trees.p[:, 0], np.ones(len(trees.tokens)))
    return ends


def coupled_length(topology: Topology, pair: DistributionPair) -> float:
    """Return the expected number of accepted tokens if draft and target draw with the same noise.

    At each depth, siblings are the tokens with the largest log q + Gumbel noise, in this order, and
    the target's token is that with the largest log p + the same noise.
    """

    def below(slot: int, depth: int, context: int) -> float:
        children = [c for c, parent in enumerate(topology.parents, start=1) if parent == slot]
        if not children:
            return 0.0
        p, q = pair.p[depth][context], pair.q[depth][context]
        ranks = chosen_by_rank(p, q, len(children))
        return sum(
            chance * (1 + below(child, depth + 1, context * len(p) + token))
            for child, row in zip(children, ranks, strict=True)
            for token, chance in enumerate(row.tolist())
            if chance > 0
        )

    return below(0, 0, 0)


def chosen_by_rank(
    p: Float[np.ndarray, "V"], q: Float[np.ndarray, "V"], count: int
) -> Float[np.ndarray, "ranks V"]:
    """Return P(token i has the largest log p + g, and rank r by log q + g) with Gumbel noise g.

    With E = exp(-g), i has the smallest E / p, and r tokens j have E_j < E_i q_j / q_i. Given E_i,
    these are independent events, and the integral over E_i is a sum of 1 / (1 + c).
    """
    found = np.zeros((count, len(p)))
    for token in np.flatnonzero((p > 0) & (q > 0)):
        others = [j for j in range(len(p)) if j != token]
        from_p, from_q = p / p[token], q / q[token]
        for rank in range(min(count, len(p))):
            for before in itertools.combinations(others, rank):
                if any(from_q[j] <= from_p[j] for j in before):
                    continue
                rates = np.array(
                    [1 + sum(max(from_p[j], from_q[j]) for j in others if j not in before)]
                )
                signs = np.ones(1)
                for j in before:
                    rates = np.concatenate([rates + from_p[j], rates + from_q[j]])
                    signs = np.concatenate([signs, -signs])
                found[rank, token] += (signs / rates).sum()
    return found


def excess(
    measure: Float[np.ndarray, "I V"],
    q: Float[np.ndarray, "I V"],
    otherwise: Float[np.ndarray, "I V"] | None = None,
) -> Float[np.ndarray, "I V"]:
    """Return norm(max(0, measure - q)), or `otherwise` (by default `measure`) where that is 0."""
    return normalized(np.maximum(measure - q, 0), measure if otherwise is None else otherwise)


def normalized(
    mass: Float[np.ndarray, "... V"], otherwise: Float[np.ndarray, "... V"] | float
) -> Float[np.ndarray, "... V"]:
    """Return rows divided by their sums, or `otherwise` where a sum is 0."""
    total = mass.sum(axis=-1, keepdims=True)
    return np.where(total > 0, mass / np.where(total > 0, total, 1), otherwise)


def _ratio(
    numerator: Float[np.ndarray, "I"], denominator: Float[np.ndarray, "I"], otherwise: float
) -> Float[np.ndarray, "I"]:
    positive = denominator > 0
    return np.where(positive, numerator / np.where(positive, denominator, 1), otherwise)


def _postorder(trees: Trees, slot: int) -> Iterator[int]:
    for child in trees.children(slot):
        yield from _postorder(trees, child)
    yield slot
