"""The tree that decodes fastest here: the most tokens per second, not the most tokens per round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specjax.errors import InputError
from specjax.trees.ranked import RankedTree, Rates, best_tree

_WIDTHS = (*range(1, 33), *range(33, 65, 4), *range(65, 129, 8), *range(129, 257, 16))
_WIDTHS += tuple(range(257, 514, 32))
"""Slots of passes: of wider ones fewer, where one slot more changes little."""


class FastestTree(NamedTuple):
    """A tree, and what it is predicted to do; without nodes where no draft pays.

    `tokens_per_round` are those of one row, the target's own included; `round_seconds` are those of
    the draft and of what `pass_seconds` says of the tree's width.
    """

    tree: RankedTree
    tokens_per_round: float
    round_seconds: float

    @property
    def row_tokens_per_second(self) -> float:
        """What each row makes."""
        return self.tokens_per_round / self.round_seconds

    def __str__(self) -> str:
        """What it is, and what is expected of it."""
        return (
            f"{self.tree}, {self.tokens_per_round:.2f} tokens per round and "
            f"{self.row_tokens_per_second:.1f} tokens/s per row expected"
        )


def fastest_tree(
    acceptance: Rates,
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
    *,
    widths: Sequence[int] = _WIDTHS,
    max_depth: int | None = None,
) -> FastestTree:
    """The tree with the most tokens per second (Sequoia's criterion, 2402.12374, section 3.3).

    `acceptance[d][r]` is the chance that the candidate of rank r at depth d (from 0) is the
    target's, given that its parent is. `pass_seconds(w)` is what a round whose pass is over w slots
    takes, the root's included, but for its draft, and `draft_seconds(d)` what drafting a tree of
    depth d takes. For each of `widths` and each depth up to `max_depth` (that of `acceptance` if
    unset) the best tree of Medusa's rule is tried, and plain decoding. Raises InputError for widths
    below 1, numbers that are no rates, and a plain pass that takes no time.
    """
    if not widths or min(widths) < 1:
        raise InputError(f"widths={tuple(widths)}: give slots of passes, from 1 on")
    plain = float(pass_seconds(1))
    if not plain > 0:
        raise InputError(f"pass_seconds(1)={plain:g} must be above 0")
    deepest = len(acceptance) if max_depth is None else min(max_depth, len(acceptance))
    best = FastestTree(RankedTree(()), 1.0, plain)
    for width in sorted({width for width in widths if width > 1}):
        for depth in range(1, deepest + 1):
            tree = best_tree(acceptance, width - 1, depth)
            # A shallower one was tried as such.
            if tree.topology.depth < depth:
                continue
            tokens = tree.expected_tokens(acceptance)
            seconds = float(pass_seconds(tree.topology.width)) + float(draft_seconds(depth))
            found = FastestTree(tree, tokens, seconds)
            if found.row_tokens_per_second > best.row_tokens_per_second:
                best = found
    return best
