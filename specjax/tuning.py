"""Choice of the token tree that is fastest on this machine, from measured costs and acceptance.

    with_fastest_trees(model, drafter, ...)     a drafter with the tree that is fastest here
    measure_ranks(...)                          how often the candidate of each rank is accepted
    measure_tree_costs(...), choose_tree(...)   the two steps of `with_fastest_trees`
    measure_expert_use(...)                     which experts texts use, for `specjax.theory`

`scripts/calibrate_trees.py` measures ranks for a drafter.
"""

from specjax.apps.tuning.choose_tree import (
    TreeCosts,
    choose_tree,
    measure_tree_costs,
    with_fastest_trees,
    with_tree,
)
from specjax.apps.tuning.measure_experts import measure_expert_use
from specjax.apps.tuning.measure_ranks import RankCounts, measure_ranks

__all__ = [
    "RankCounts",
    "TreeCosts",
    "choose_tree",
    "measure_expert_use",
    "measure_ranks",
    "measure_tree_costs",
    "with_fastest_trees",
    "with_tree",
]
