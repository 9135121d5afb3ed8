"""The fastest trees on paper, as a table.

    python scripts/documents/tree_choices.py [--drafter=eagle3]

For an H100, an H200, a TPU v5e and a v5p, an 8B and a 70B target and several batch sizes: the tree
with the most tokens per second at the chip's limits (`specjax.theory.roofline_tree`), for the rates
that were measured of a shipped drafter. As many chips as hold the weights, their figures added up.
Exit codes: 0; 2 for bad input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from specjax import theory
from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.errors import InputError
from specjax.fields import Number, Text, Whole
from specjax.loading.acceptance_rates import ranks_file, read_acceptance
from specjax.loading.find_head import SHIPPED
from specjax.loading.load import DEFAULT_MODEL

_CHIPS = ("h100-sxm", "h200", "tpu-v5e", "tpu-v5p")
_TARGETS = {
    "8B": theory.ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": theory.ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
}
_BATCHES = (1, 4, 16, 64)
_ITEMSIZE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _print(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/documents/tree_choices.py", __doc__)
    flags.add_field("drafter", Text(), "a shipped drafter with measured rates", default="eagle3")
    flags.add_field("draft_cost", Number(0.0), "of a level, in plain passes", default=0.03)
    flags.add_field("context", Whole(0), "committed tokens per row", default=1000)
    return flags


def _print(drafter: str, draft_cost: float, context: int) -> None:
    file = ranks_file(SHIPPED / DEFAULT_MODEL, drafter)
    if not file.is_file():
        raise InputError(f"drafter={drafter!r}: no rates of it come with specjax; use eagle3")
    acceptance = read_acceptance(file)
    print("| chip | target | " + " | ".join(f"B = {batch}" for batch in _BATCHES) + " |")
    print("|---|---|" + "---|" * len(_BATCHES))
    for name in _CHIPS:
        for size, shape in _TARGETS.items():
            one = theory.CHIPS[name]
            # Some of the memory is for caches.
            count = math.ceil(shape.num_params() * _ITEMSIZE / (0.8 * one.memory))
            figures = {
                field: count * getattr(one, field) for field in ("flops", "bandwidth", "memory")
            }
            chip = dataclasses.replace(one, **figures)
            cells = []
            for batch in _BATCHES:
                found = theory.roofline_tree(
                    shape, chip, acceptance, batch=batch, context=context, draft_cost=draft_cost
                )
                plain = theory.pass_seconds(shape, chip, tokens=1, batch=batch, context=context)
                gain = found.row_tokens_per_second * float(plain)
                nodes, depth = found.tree.topology.num_nodes, found.tree.topology.depth
                cells.append(f"{nodes} nodes, {depth} levels: {gain:.2f}x" if nodes else "none")
            chips = f"{count} x {name}" if count > 1 else name
            print(f"| {chips} | {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
