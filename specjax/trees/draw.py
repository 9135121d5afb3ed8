"""Draw token trees as text and as SVG pictures."""

from __future__ import annotations

import html
from collections.abc import Sequence

from specjax.errors import InputError
from specjax.trees.shapes import RankedTree
from specjax.trees.topology import Topology

_LINE, _LETTER, _GAP = 22, 7.3, 34
"""In pixels: the height of a row, the width of a letter, the gap between columns."""
_PLAIN = "#59636e"


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


def svg(
    tree: Topology | RankedTree,
    labels: Sequence[str],
    *,
    colours: Sequence[str] | None = None,
    root: str = "root",
    title: str = "A token tree",
) -> str:
    """Return an SVG picture of a tree from left to right, with one column per depth.

    `labels` are the texts of the nodes, such as their tokens; `colours` are CSS colours for their
    backgrounds, grey by default; `root` labels the root, and `title` describes the picture to
    screen readers. Raises InputError unless `labels` and `colours` have one entry per node.
    """
    topology = tree.topology if isinstance(tree, RankedTree) else tree
    colours = [_PLAIN] * topology.num_nodes if colours is None else colours
    for name, texts_of_nodes in (("labels", labels), ("colours", colours)):
        if len(texts_of_nodes) != topology.num_nodes:
            raise InputError(
                f"{name}: {len(texts_of_nodes)} for {topology.num_nodes} nodes; give each one"
            )
    texts = [root, *labels]
    widths = [max(len(text), 1) * _LETTER + 12 for text in texts]
    depths = topology.depths.tolist()
    lefts = [8.0]
    for depth in range(topology.depth):
        column = [
            width for width, slot_depth in zip(widths, depths, strict=True) if slot_depth == depth
        ]
        lefts.append(lefts[-1] + max(column, default=0) + _GAP)
    rows = _rows(topology)
    last = [lefts[depth] + width for depth, width in zip(depths, widths, strict=True)]
    width, height = max(last) + 8, (max(rows) + 1) * _LINE + 8
    parts = []
    for slot, parent in enumerate(topology.parents, start=1):
        x0, y0 = lefts[depths[parent]] + widths[parent], _middle(rows[parent])
        x1, y1 = lefts[depths[slot]], _middle(rows[slot])
        bend = (x0 + x1) / 2
        parts.append(
            f'<path d="M{x0:.0f} {y0:.0f}C{bend:.0f} {y0:.0f} {bend:.0f} {y1:.0f} {x1:.0f} '
            f'{y1:.0f}" fill="none" stroke="#8c959f"/>'
        )
    for slot, text in enumerate(texts):
        x, y = lefts[depths[slot]], _middle(rows[slot])
        colour = _PLAIN if slot == 0 else colours[slot - 1]
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="{widths[slot]:.0f}" height="18" rx="4" '
            f'fill="{html.escape(colour)}"/>'
            f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" fill="#fff" xml:space="preserve" '
            f'font-family="monospace" font-size="12">{html.escape(text)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img"><title>{html.escape(title)}</title>'
        + "".join(parts)
        + "</svg>\n"
    )


def _rows(topology: Topology) -> list[float]:
    """Return each slot's vertical position in rows: a row per leaf, parents amid their children."""
    children: list[list[int]] = [[] for _ in range(topology.width)]
    for slot, parent in enumerate(topology.parents, start=1):
        children[parent].append(slot)
    rows = [0.0] * topology.width
    leaves = 0

    def place(slot: int) -> None:
        nonlocal leaves
        for child in children[slot]:
            place(child)
        if children[slot]:
            rows[slot] = (rows[children[slot][0]] + rows[children[slot][-1]]) / 2
        else:
            rows[slot] = leaves
            leaves += 1

    place(0)
    return rows


def _middle(row: float) -> float:
    return 4 + (row + 0.5) * _LINE
