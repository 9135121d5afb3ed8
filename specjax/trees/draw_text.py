"""Draw token trees as text."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.errors import InputError
from specjax.trees.static_trees import RankedTree
from specjax.trees.topology import Topology


def draw(
    tree: Topology | RankedTree, labels: Sequence[str] | None = None, root: str = "root"
) -> str:
    """Return a tree as text, with one node per line, indented under its parent.

    `labels` are the texts of the nodes, such as their tokens; by default the ranks of a
    `RankedTree` or the slots of a `Topology`. `root` labels the root. Raises InputError unless
    there is one label per node.
    """
    topology = tree.topology if isinstance(tree, RankedTree) else tree
    if labels is None:
        slots = range(1, topology.width)
        labels = list(map(str, tree.ranks if isinstance(tree, RankedTree) else slots))
    if len(labels) != topology.num_nodes:
        raise InputError(f"labels: {len(labels)} for {topology.num_nodes} nodes; give each one")
    children: list[list[int]] = [[] for _ in range(topology.width)]
    for slot, parent in enumerate(topology.parents, start=1):
        children[parent].append(slot)
    lines = [root]

    def add_children(slot: int, indent: str) -> None:
        for child in children[slot]:
            last = child == children[slot][-1]
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{labels[child - 1]}")
            add_children(child, indent + ("   " if last else "│  "))

    add_children(0, "")
    return "\n".join(lines)
