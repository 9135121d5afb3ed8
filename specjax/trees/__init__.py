"""Token trees: their shapes, drafts in fixed-shape buffers, and drawings.

    tree_of_choices(paths)              a tree from paths of ranks, such as `medusa_choices`
    expansion_tree((1, 1, 3, 1))        a number of children per node for each level (SpecInfer)
    best_tree(rates, num_nodes)         the most accepted tokens from measured rates (Medusa)
    sequoia_tree(rates, n, depth)       the same by dynamic programming, for rates in any order
    fastest_tree(rates, ...)            the most tokens per second, given the cost of passes
    draw(tree), svg(tree, labels)       a tree as text, or as a picture
    chain(tokens, num_valid, logq)      a draft without branches, for drafters of your own
    merge(*drafts)                      several drafts as one tree, without duplicates

    tree = best_tree([[0.6, 0.2], [0.5, 0.2]], num_nodes=4)
    print(draw(tree), tree.expected_tokens([[0.6, 0.2], [0.5, 0.2]]))

A `Topology` is a shape known at compile time, a `DynamicTopology` a shape per row chosen on the
device, and a `Draft` the tokens of one round in either. A `RankedTree` is a `Topology` whose nodes
are the most likely candidates by rank. A `DynamicTree` has the sizes of trees that are chosen anew
in each round. More: docs/trees.md.

After this text `help` lists classes, then functions; `help(best_tree)` explains one of them.
"""

from specjax.trees.draft import Draft, PartialPass, chain
from specjax.trees.draw import draw, svg
from specjax.trees.fastest import FastestTree, fastest_tree
from specjax.trees.merge import merge, merge_duplicates, side_by_side
from specjax.trees.shapes import (
    DynamicTree,
    RankedTree,
    Rates,
    best_tree,
    expansion_tree,
    sequoia_tree,
    tree_of_choices,
)
from specjax.trees.topology import AnyTopology, DynamicTopology, Topology, chain_topology

__all__ = [
    "AnyTopology",
    "Draft",
    "DynamicTopology",
    "DynamicTree",
    "FastestTree",
    "PartialPass",
    "RankedTree",
    "Rates",
    "Topology",
    "best_tree",
    "chain",
    "chain_topology",
    "draw",
    "expansion_tree",
    "fastest_tree",
    "merge",
    "merge_duplicates",
    "sequoia_tree",
    "side_by_side",
    "svg",
    "tree_of_choices",
]
