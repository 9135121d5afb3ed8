"""Token trees: their shapes, drafts in fixed-shape buffers, and pictures.

A `Topology` is a shape that is known when programs are compiled, a `DynamicTopology` one of each
row that is chosen on the device, and a `Draft` one round's tokens in either. A `RankedTree` also
says which candidate each node is, the likeliest or one of the next: from a list of choices like
Medusa's, or built from measured acceptance (`best_tree`, `sequoia_tree`; `fastest_tree` also knows
what passes cost). A `DynamicTree` has the sizes of trees that are chosen anew in each round.
`merge` makes one tree of several drafts. `draw` shows trees as text, `svg` as a picture.
"""

from specjax.trees.draft import Draft as Draft
from specjax.trees.draft import chain as chain
from specjax.trees.draw import draw as draw
from specjax.trees.dynamic_sizes import DynamicTree as DynamicTree
from specjax.trees.fastest import FastestTree as FastestTree
from specjax.trees.fastest import fastest_tree as fastest_tree
from specjax.trees.merge import merge as merge
from specjax.trees.merge import merge_duplicates as merge_duplicates
from specjax.trees.merge import side_by_side as side_by_side
from specjax.trees.picture import svg as svg
from specjax.trees.ranked import RankedTree as RankedTree
from specjax.trees.ranked import Rates as Rates
from specjax.trees.ranked import best_tree as best_tree
from specjax.trees.ranked import expansion_tree as expansion_tree
from specjax.trees.ranked import sequoia_tree as sequoia_tree
from specjax.trees.ranked import tree_of_choices as tree_of_choices
from specjax.trees.topology import AnyTopology as AnyTopology
from specjax.trees.topology import DynamicTopology as DynamicTopology
from specjax.trees.topology import Topology as Topology
from specjax.trees.topology import chain_topology as chain_topology
