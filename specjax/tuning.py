"""Choice of the token tree that is fastest on this machine: see `specjax.apps.tuning`."""

from specjax.apps.tuning import (
    RankCounts,
    TreeCosts,
    choose_tree,
    measure_ranks,
    measure_tree_costs,
    with_fastest_trees,
    with_tree,
)

__all__ = [
    "RankCounts",
    "TreeCosts",
    "choose_tree",
    "measure_ranks",
    "measure_tree_costs",
    "with_fastest_trees",
    "with_tree",
]
