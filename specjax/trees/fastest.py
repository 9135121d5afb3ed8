"""The choice of the tree with the most tokens per second, rather than per round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specjax.errors import InputError
from specjax.trees.shapes import RankedTree, Rates, best_tree

_WIDTHS = (*range(1, 33), *range(33, 65, 4), *range(65, 129, 8), *range(129, 257, 16))
_WIDTHS += tuple(range(257, 514, 32))
"""Pass widths to compare, sparser among wide passes, where one more slot changes little."""


class FastestTree(NamedTuple):
    """A tree and its predicted speed; the tree has no nodes if plain decoding is fastest.

    `tokens_per_round` is per row and includes the bonus token; `round_seconds` is the time of the
    draft plus `pass_seconds` at the tree's width.
    """

    tree: RankedTree
    tokens_per_round: float
    round_seconds: float

    @property
    def row_tokens_per_second(self) -> float:
        """The predicted tokens per second of each row."""
        return self.tokens_per_round / self.round_seconds

    def __str__(self) -> str:
        """Return the tree and its predicted speed in words."""
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
    """Return the tree with the most tokens per second (Sequoia, 2402.12374, section 3.3).

    `acceptance[d][r]` is the probability that the candidate of rank r at depth d (from 0) is the
    target's token, given that its parent is. `pass_seconds(w)` is the time of a round without
    drafting at a pass width of w slots, root included; `draft_seconds(d)` is the time to draft a
    tree of depth d. The candidates are plain decoding and, for each of `widths` and each depth up
    to `max_depth` (by default the depth of `acceptance`), the tree of `best_tree`. Raises
    InputError for widths below 1, for rates outside [0, 1], and if a pass of width 1 takes no time.
    """
    if not widths or min(widths) < 1:
        raise InputError(f"widths={tuple(widths)}: give slots of passes, from 1 on")
    plain = float(pass_seconds(1))
    if not plain > 0:
        raise InputError(f"pass_seconds(1)={plain:g} must be above 0")
    max_levels = len(acceptance) if max_depth is None else min(max_depth, len(acceptance))
    best = FastestTree(RankedTree(()), 1.0, plain)
    for width in sorted({width for width in widths if width > 1}):
        for depth in range(1, max_levels + 1):
            tree = best_tree(acceptance, width - 1, depth)
            # A shallower tree was tried already.
            if tree.topology.depth < depth:
                continue
            tokens = tree.expected_tokens(acceptance)
            seconds = float(pass_seconds(tree.topology.width)) + float(draft_seconds(depth))
            candidate = FastestTree(tree, tokens, seconds)
            if candidate.row_tokens_per_second > best.row_tokens_per_second:
                best = candidate
    return best
