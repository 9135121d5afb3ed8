"""Shapes of trees: static ones of the likeliest candidates, and sizes of those chosen in a round.

The methods for static trees are those of Medusa ([2401.10774](https://arxiv.org/abs/2401.10774),
section 2.1.2 and appendix C) and Sequoia ([2402.12374](https://arxiv.org/abs/2402.12374), section
3.1). Trees chosen anew in each round are those of EAGLE-2
([2406.16858](https://arxiv.org/abs/2406.16858)).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from specjax.errors import InputError
from specjax.trees.topology import Topology

Path = tuple[int, ...]
"""A node, given by the ranks on the path from the root to it.

(0,) is the most likely first token, and (0, 1) the second most likely token after it.
"""
Rates = Sequence[Sequence[float] | Float[np.ndarray, "ranks"]] | Float[np.ndarray, "depths ranks"]
"""Acceptance rates: entry [d][r] is the probability that the candidate of rank r at depth d
(from 0) is the target's token, given that its parent is.
"""


@dataclass(frozen=True)
class RankedTree:
    """A tree of fixed shape in which each node is its parent's candidate of a given rank.

    Rank 0 is the most likely candidate. `choices` are the nodes as paths of ranks from the root. A
    node comes after its parent and after its siblings of lower rank, so that the first n nodes form
    a tree for every n. Hashable. Raises InputError for another order, and if the ranks of siblings
    are not 0, 1, 2, ...
    """

    choices: tuple[Path, ...]

    def __post_init__(self) -> None:
        known: set[Path] = set()
        for path in self.choices:
            if not path or min(path) < 0:
                raise InputError(
                    f"choices: {list(path)} is no path; use ranks from 0 on, one for each token"
                )
            if path in known:
                raise InputError(f"choices: {list(path)} is there twice; leave one out")
            *before, rank = path
            for needed in ((*before,), (*before, rank - 1)):
                if needed and needed[-1] >= 0 and needed not in known:
                    missing = "comes after it" if needed in self.choices else "is missing"
                    raise InputError(
                        f"choices: {list(path)} needs {list(needed)}, which {missing}; a node "
                        "comes after its parent and after siblings of lower rank"
                    )
            known.add(path)

    def __str__(self) -> str:
        """Return the size of the tree in words."""
        shape = self.topology
        if not self.choices:
            return "no draft"
        if shape.is_chain:
            return f"a chain of {shape.depth} {'token' if shape.depth == 1 else 'tokens'}"
        return f"{shape.num_nodes} nodes in {shape.depth} levels"

    @cached_property
    def topology(self) -> Topology:
        """The shape of the tree."""
        slots = {(): 0} | {path: slot for slot, path in enumerate(self.choices, start=1)}
        return Topology(tuple(slots[path[:-1]] for path in self.choices))

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N)."""
        return len(self.choices)

    @property
    def depth(self) -> int:
        """The number of nodes on the longest path (P)."""
        return max(map(len, self.choices), default=0)

    def limited(self, depth: int) -> RankedTree:
        """Return the tree without the nodes deeper than `depth`."""
        return RankedTree(tuple(path for path in self.choices if len(path) <= depth))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among the candidates after its parent."""
        return tuple(path[-1] for path in self.choices)

    @property
    def most_candidates(self) -> int:
        """The largest number of children of a slot: the candidates that a drafter must propose."""
        return max(self.ranks, default=-1) + 1

    def expected_tokens(self, acceptance: Rates) -> float:
        """Return the expected number of tokens per round, bonus token included.

        `acceptance[d][r]` is the probability that the candidate of rank r at depth d (from 0) is
        the target's token, given that its parent is. Raises InputError if it has no entry for some
        node.
        """
        rates = _rates(acceptance)
        return 1.0 + sum(_chance(path, rates) for path in self.choices)


@dataclass(frozen=True)
class DynamicTree:
    """The sizes of a tree whose shape is chosen on the device, in each round and for each row.

    The candidates are the `topk` most likely tokens after the root and, on each further level,
    after each of the `topk` best candidates of the previous level, down to `depth` levels (P). The
    best `num_nodes` (N) of all candidates form the tree. Raises InputError for negative numbers,
    for `topk` 0, and for more nodes than there are candidates.
    """

    topk: int
    depth: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name, least in (("topk", 1), ("depth", 0), ("num_nodes", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.num_nodes > self.num_candidates:
            raise InputError(
                f"num_nodes={self.num_nodes}: with topk={self.topk} and depth={self.depth} there "
                f"are {self.num_candidates} candidates; lower it, or raise topk or depth"
            )

    @property
    def num_candidates(self) -> int:
        """The number of candidates on all levels."""
        return self.topk + (self.depth - 1) * self.topk**2 if self.depth else 0

    def limited(self, depth: int) -> DynamicTree:
        """Return the sizes with at most `depth` levels, and no more nodes than candidates."""
        shallow = replace(self, depth=min(self.depth, depth), num_nodes=0)
        return replace(shallow, num_nodes=min(self.num_nodes, shallow.num_candidates))


def tree_of_choices(choices: Iterable[Sequence[int]]) -> RankedTree:
    """Return the tree with the given paths of ranks, such as `medusa_choices`, sorted by depth.

    The paths may be in any order. Raises InputError if a path is repeated, skips a rank, or has no
    parent among the paths.
    """
    paths = (tuple(path) for path in choices)
    return RankedTree(tuple(sorted(paths, key=lambda path: (len(path), path))))


def expansion_tree(expansion: Sequence[int]) -> RankedTree:
    """Return the tree in which each node at depth d (0 is the root) has `expansion[d]` children.

    For example, SpecInfer's expansion (1, 1, 3, 1) (2305.09781, section 3) is a chain of two
    tokens, three candidates after it, and one token after each of these. Raises InputError for a
    level without nodes.
    """
    if any(count < 1 for count in expansion):
        raise InputError(f"expansion={tuple(expansion)}: a level has at least one node per parent")
    levels = [
        itertools.product(*map(range, expansion[:depth])) for depth in range(1, len(expansion) + 1)
    ]
    return RankedTree(tuple(itertools.chain.from_iterable(levels)))


def best_tree(acceptance: Rates, num_nodes: int, max_depth: int | None = None) -> RankedTree:
    """Return the tree of `num_nodes` nodes with the most expected accepted tokens (Medusa's rule).

    `acceptance[d][r]` is the probability that the candidate of rank r at depth d (from 0) is the
    target's token, given that its parent is. The tree grows by repeatedly adding the node with the
    largest product of these rates along its path, the shallowest one if several are equal. This is
    optimal if acceptance decreases with rank, as measured rates do. The tree is smaller if there
    are fewer than `num_nodes` candidates. Raises InputError for rates outside [0, 1].
    """
    _check_size(num_nodes)
    rates = _rates(acceptance)
    deepest = len(rates) if max_depth is None else min(max_depth, len(rates))
    chosen: list[Path] = []
    waiting: list[tuple[float, int, Path]] = []

    def wait(path: Path) -> None:
        if len(path) <= deepest and path[-1] < len(rates[len(path) - 1]):
            heapq.heappush(waiting, (-_chance(path, rates), len(path), path))

    wait((0,))
    while waiting and len(chosen) < num_nodes:
        _, _, path = heapq.heappop(waiting)
        chosen.append(path)
        wait((*path, 0))
        wait((*path[:-1], path[-1] + 1))
    return RankedTree(tuple(chosen))


def sequoia_tree(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> RankedTree:
    """Return the tree with the most expected accepted tokens, by Sequoia's dynamic programming.

    `acceptance[r]` is the probability that the r-th sibling is accepted, at any depth; the rates
    may be in any order. The tree has at most `num_nodes` nodes and `max_depth` levels. Raises
    InputError for rates outside [0, 1] or a depth below 1.
    """
    _check_size(num_nodes)
    if max_depth < 1:
        raise InputError(f"max_depth={max_depth} must be at least 1")
    (rates,) = _rates([acceptance])
    # `below[n]`: expected tokens below a node, with at most n nodes in the levels done so far.
    below = np.zeros(num_nodes + 1)
    levels = []
    for _ in range(max_depth):
        # `value[c, n]`: the same, with exactly n nodes under the first c children, none of them
        # left out; `size[c, n]` of these nodes are the last child and its descendants.
        value = np.full((len(rates) + 1, num_nodes + 1), -np.inf)
        size = np.zeros(value.shape, int)
        value[0, 0] = 0.0
        for child, rate in enumerate(rates):
            last_child_value = rate * (1.0 + below[:-1])
            for nodes in range(1, num_nodes + 1):
                # The last child has 1, 2, ... nodes, the ones before it the rest.
                each = value[child, :nodes][::-1] + last_child_value[:nodes]
                size[child + 1, nodes] = 1 + np.argmax(each)
                value[child + 1, nodes] = each.max()
        levels.append((value, size))
        below = np.maximum.accumulate(value.max(axis=0))

    chosen: list[Path] = []

    def add(path: Path, max_nodes: int, level: int) -> None:
        if level < 0:
            return
        value, size = levels[level]
        nodes = int(np.argmax(value.max(axis=0)[: max_nodes + 1]))
        for child in reversed(range(int(np.argmax(value[:, nodes])))):
            child_nodes = int(size[child + 1, nodes])
            chosen.append((*path, child))
            add((*path, child), child_nodes - 1, level - 1)
            nodes -= child_nodes

    add((), num_nodes, max_depth - 1)
    return tree_of_choices(chosen)


def _chance(path: Path, rates: Sequence[Float[np.ndarray, "..."]]) -> float:
    """Return the probability that all tokens of a path are the target's.

    Raises InputError if `rates` has no entry for one of them.
    """
    chance = 1.0
    for depth, rank in enumerate(path):
        if depth >= len(rates) or rank >= len(rates[depth]):
            raise InputError(f"acceptance has no rate of rank {rank} at depth {depth}")
        chance *= float(rates[depth][rank])
    return chance


def _rates(acceptance: Rates) -> list[Float[np.ndarray, "..."]]:
    rates = [np.asarray(level, float) for level in acceptance]
    for depth, level in enumerate(rates):
        if level.ndim != 1 or not ((level >= 0) & (level <= 1)).all() or level.sum() > 1 + 1e-6:
            raise InputError(
                f"acceptance[{depth}]={level.tolist()} must be rates from 0 to 1, together at most "
                "1: of candidates of which at most one is the target's"
            )
    return rates


def _check_size(num_nodes: int) -> None:
    if num_nodes < 1:
        raise InputError(f"num_nodes={num_nodes} must be at least 1")
