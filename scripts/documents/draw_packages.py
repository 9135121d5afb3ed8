"""Draw docs/packages.svg: the packages of specjax, and which imports which, from the source.

    python scripts/documents/draw_packages.py

An arrow that follows from others is left out (a -> c where a -> b -> c), and so are
`specjax.errors` and `specjax.signals`, which any module may import.
"""

from __future__ import annotations

import ast
import html
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import app

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "packages.svg"
COMMANDS = "decode bench report export"
LEFT_OUT = {"errors", "signals"}
NOTES = {
    "train": "trains drafters",
    COMMANDS: "command lines",
    "theory": "formulas",
    "testing": "check_rule, check_drafter",
    "cli": "configs, terminal",
    "reporting": "reports, tables, plots",
    "decoding": "the loop over rounds",
    "drafters": "one per file, registry",
    "loading": "models, heads, tokenizers",
    "controllers": "how long to draft",
    "tuning": "the fastest tree",
    "models": "decoder, heads, kernels",
    "distributed": "meshes, processes",
    "fields": "kinds of values",
    "files": "paths, JSON, folders",
    "sampling": "warp and rules",
    "trees": "drafts",
    "cache": "keys and values",
    "metrics": "numbers from counts",
}
"""The line under each box's name."""
WIDTH, HEIGHT, GAP, LEVEL_GAP, MARGIN = 216, 46, 18, 40, 20

Graph = Mapping[str, set[str]]


def modules() -> dict[str, str]:
    """The source of each module of specjax and train by its dotted name; a package by its own."""
    found = {}
    for root in ("specjax", "train"):
        for file in (ROOT / root).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = file.read_text(encoding="utf-8")
    return found


def imports(source: str, known: set[str]) -> Iterator[str]:
    """The modules, of those that are known, that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [one if one in known else node.module for one in inside]
            yield from (one for one in found if one in known)


def module_graph() -> dict[str, set[str]]:
    """What each module imports; without the package `specjax`, which loads its names lazily."""
    sources = modules()
    del sources["specjax"]
    known = set(sources)
    return {name: set(imports(source, known)) for name, source in sources.items()}


def package_graph() -> dict[str, set[str]]:
    """What each box of the picture imports, from all of its modules."""
    edges: dict[str, set[str]] = {}
    for name, others in module_graph().items():
        for other in {name, *others}:
            edges.setdefault(_box(name), set()).add(_box(other))
    return {
        box: {other for other in others if other not in LEFT_OUT | {box}}
        for box, others in edges.items()
        if box not in LEFT_OUT
    }


def reduced(edges: Graph) -> dict[str, set[str]]:
    """The edges that do not follow from others. The graph must have no circle."""
    reach: dict[str, set[str]] = {}

    def reachable(box: str) -> set[str]:
        if box not in reach:
            reach[box] = set(edges[box]).union(*map(reachable, edges[box]))
        return reach[box]

    return {
        box: {one for one in others if not any(one in reachable(other) for other in others - {one})}
        for box, others in edges.items()
    }


def levels(edges: Graph) -> list[list[str]]:
    """Boxes by rows from the top down, each in the row below the last box that imports it."""
    importers = {box: {one for one, others in edges.items() if box in others} for box in edges}
    row_of: dict[str, int] = {}

    def row(box: str) -> int:
        if box not in row_of:
            row_of[box] = 1 + max(map(row, importers[box]), default=-1)
        return row_of[box]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(row, edges)))]
    for box in sorted(edges, key=[*NOTES, *edges].index):
        rows[row_of[box]].append(box)
    return rows


def svg() -> str:
    """The picture as it is written to docs/packages.svg."""
    edges = reduced(package_graph())
    rows = levels(edges)
    most = max(map(len, rows))
    across = most * WIDTH + (most - 1) * GAP + 2 * MARGIN
    down = len(rows) * HEIGHT + (len(rows) - 1) * LEVEL_GAP + 2 * MARGIN
    corner = {}
    for number, row in enumerate(rows):
        left = (across - len(row) * WIDTH - (len(row) - 1) * GAP) / 2
        for index, box in enumerate(row):
            top = MARGIN + number * (HEIGHT + LEVEL_GAP)
            corner[box] = (left + index * (WIDTH + GAP), top)
    lines = [
        f'<path d="{_curve(corner[box], corner[other])}" marker-end="url(#tip)"/>'
        f"<!-- {box} -> {other} -->"
        for box in sorted(edges)
        for other in sorted(edges[box])
    ]
    boxes = [_drawn(box, *corner[box]) for row in rows for box in row]
    return _FRAME.format(
        across=across, down=down, arrows="\n    ".join(lines), boxes="\n    ".join(boxes)
    )


def _box(module: str) -> str:
    first, *rest = module.split(".")
    name = first if first == "train" else rest[0]
    return COMMANDS if name in COMMANDS.split() else name


def _curve(above: tuple[float, float], below: tuple[float, float]) -> str:
    """Straight down beside the rows between, then across in the gap above the lower box."""
    x, y = above[0] + WIDTH / 2, above[1] + HEIGHT
    to_x, to_y = below[0] + WIDTH / 2, below[1] - 2
    turn = below[1] - LEVEL_GAP
    middle = (turn + to_y) / 2
    return f"M{x:g} {y:g} V{turn:g} C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"


def _drawn(box: str, left: float, top: float) -> str:
    middle, note = left + WIDTH / 2, NOTES.get(box, "")
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="name" x="{middle:g}" y="{top + 20:g}">{html.escape(box)}</text>'
        f'<text class="note" x="{middle:g}" y="{top + 36:g}">{html.escape(note)}</text>'
    )


_FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" width="{across}" \
height="{down}" role="img" aria-labelledby="title">
  <title id="title">The packages of specjax; an arrow leads from a package to one it imports</title>
  <style>
    .page {{ fill: #ffffff; }}
    text {{ fill: #1f2328; text-anchor: middle; }}
    .name {{ font: 600 13px ui-monospace, Menlo, Consolas, monospace; }}
    .note {{ fill: #59636e; font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }}
    .boxes rect {{ fill: #eaeef2; stroke: #818b98; }}
    .arrows path {{ fill: none; stroke: #818b98; stroke-width: 1.3; }}
    #tip path {{ fill: #818b98; }}
    @media (prefers-color-scheme: dark) {{
      .page {{ fill: #0d1117; }}
      text {{ fill: #e6edf3; }}
      .note {{ fill: #9198a1; }}
      .boxes rect {{ fill: #262c36; stroke: #6e7681; }}
    }}
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto">
      <path d="M0 0 L8 4 L0 8 Z"/>
    </marker>
  </defs>
  <rect class="page" width="{across}" height="{down}" rx="10"/>
  <g class="arrows">
    {arrows}
  </g>
  <g class="boxes">
    {boxes}
  </g>
</svg>
"""


def main(argv: list[str]) -> None:
    """Write the picture."""
    del argv
    PICTURE.write_text(svg(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    app.run(main)
