"""What a drafter's candidates are worth, and which token tree of them is fastest here."""

from specjax.tuning.choose_tree import TreeCosts as TreeCosts
from specjax.tuning.choose_tree import choose_tree as choose_tree
from specjax.tuning.choose_tree import measure_tree_costs as measure_tree_costs
from specjax.tuning.choose_tree import with_fastest_trees as with_fastest_trees
from specjax.tuning.choose_tree import with_tree as with_tree
from specjax.tuning.measure_ranks import RankCounts as RankCounts
from specjax.tuning.measure_ranks import measure_ranks as measure_ranks
