"""Sizes of trees that are chosen anew in each round (EAGLE-2, Li et al. 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specjax.errors import InputError


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
