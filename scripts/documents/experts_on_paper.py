"""What GLM-4.7 with its MTP module would need and gain.

    python scripts/documents/experts_on_paper.py

Tables for eight H200 and 64 TPU v5e by batch size, at the chips' limits (`specjax.theory`), as if
several chips were one of their summed figures: what is sent between them is left out. Weights and
cache are in `--itemsize` bytes; `--alpha` is the chance that a draft token is accepted. Exit codes:
0; 2 for bad input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax import theory
from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.fields import Number, Whole

GLM_4_7 = theory.ModelShape(
    num_layers=92,
    hidden_size=5120,
    intermediate_size=12288,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151552,
    experts=theory.ExpertShape(
        num_experts=160, per_token=8, intermediate_size=1536, shared_size=1536, num_dense=3
    ),
)
_MACHINES = (("h200", 8), ("tpu-v5e", 64))
_BATCHES = np.array([1, 4, 16, 64, 256])
_DRAFTS = (1, 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _print(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/documents/experts_on_paper.py", __doc__)
    flags.add_field("context", Whole(0), "committed tokens per row", default=4096)
    flags.add_field("alpha", Number(0.0, 1.0), "chance of a draft token", default=0.9)
    flags.add_field("itemsize", Whole(1, 4), "bytes of a weight", default=2)
    return flags


def _print(context: int, alpha: float, itemsize: int) -> None:
    module = GLM_4_7.mtp()
    print(
        f"GLM-4.7: {GLM_4_7.num_params() / 1e9:.0f}B parameters, its module "
        f"{module.num_params() / 1e9:.1f}B; {GLM_4_7.num_matmul_params() / 1e9:.0f}B for each token"
    )
    head = [
        "machine",
        "B",
        "experts read per layer",
        "fits",
        "T(2)/T(1)",
        "plain, tokens/s per row",
    ]
    head += [f"{drafts} draft token{'s' * (drafts > 1)}" for drafts in _DRAFTS]
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for name, count in _MACHINES:
        one = theory.CHIPS[name]
        summed = {part: count * getattr(one, part) for part in ("flops", "bandwidth", "memory")}
        chip = dataclasses.replace(one, name=f"{count} x {name}", **summed)
        where = {"batch": _BATCHES, "context": context, "itemsize": itemsize}
        one_token, two = (
            theory.pass_seconds(GLM_4_7, chip, tokens=tokens, **where) for tokens in (1, 2)
        )
        found = [
            theory.roofline(
                GLM_4_7,
                chip,
                _BATCHES,
                context,
                drafts,
                alpha,
                draft_cost=module,
                itemsize=itemsize,
            )
            for drafts in _DRAFTS
        ]
        for row, batch in enumerate(_BATCHES):
            cells = [
                chip.name,
                f"{batch}",
                f"{GLM_4_7.experts.distinct(batch):.0f}",
                "yes" if found[0].fits[row] else "no",
                f"{two[row] / one_token[row]:.2f}",
                f"{1 / one_token[row]:.0f}",
                *(f"{one.speedup[row]:.2f}x" for one in found),
            ]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
