"""What a round over a token tree costs beside a round over a chain of as many nodes.

    python scripts/costs/time_tree_rounds.py --nodes=32 --batch_size=1

Drafts are the same in each round, so that drafting costs nothing and every round has all nodes: of
a chain, of a static tree, and of a dynamic one of the same shape. Each is decoded in turn, several
times, greedily and at temperature 1, with the default model. Printed are the medians of seconds per
round, and the medians, the least and the largest of the ratios to the chain's of the same turn.
Exit codes: 0; 2 for bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax.numpy as jnp

import specjax
from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.drafters import Context, Noise
from specjax.drafters.growth.options import usual_rates
from specjax.fields import Whole
from specjax.trees import Draft, DynamicTopology, Topology, best_tree
from specjax.tuning.round_seconds import FreeTree

_PROMPT = "Write a short story about a lighthouse."


@dataclass(frozen=True, kw_only=True)
class SameTree(FreeTree):
    """A tree that is free, its shape known when programs are compiled or chosen by each row."""

    dynamic: bool = False

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """The same in each round."""
        draft, state = super().propose(params, state, context, noise)
        if self.dynamic:
            parents = jnp.asarray(self.topology.parents, jnp.int32)
            parents = jnp.broadcast_to(parents, draft.tokens.shape)
            draft = draft.replace(topology=DynamicTopology(parents, self.topology.depth))
        return draft, state


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _measure(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/costs/time_tree_rounds.py", __doc__)
    flags.add_field("nodes", Whole(2, 256), "nodes of each draft", default=32)
    flags.add_field("batch_size", Whole(1), "rows", default=1)
    flags.add_field("new_tokens", Whole(8), "of each row", default=48)
    flags.add_field("repeats", Whole(1), "turns", default=5)
    return flags


def _measure(nodes: int, batch_size: int, new_tokens: int, repeats: int) -> None:
    command.use_compilation_cache()
    target = specjax.load_model("smollm2-135m-instruct")
    tree = best_tree([usual_rates(8)[0]] * 5, nodes).topology
    drafters = {
        "chain": SameTree(topology=Topology(tuple(range(nodes)))),
        "static tree": SameTree(topology=tree),
        "dynamic tree": SameTree(topology=tree, dynamic=True),
    }
    for temperature in (0.0, 1.0):
        sampling = specjax.SamplingParams(
            temperature=temperature, max_new_tokens=new_tokens, ignore_eos=True
        )
        seconds: dict[str, list[float]] = {name: [] for name in drafters}
        for turn in range(repeats + 1):
            for name, drafter in drafters.items():
                run = specjax.generate(
                    target,
                    [_PROMPT] * batch_size,
                    drafter=drafter,
                    sampling=sampling,
                    batch_size=batch_size,
                )
                rounds = int((run.emitted >= 0).sum(axis=1).max())
                # The first turn compiles.
                if turn:
                    seconds[name].append(run.decode_s / rounds)
        print(f"temperature {temperature:g}, {nodes} nodes, B = {batch_size}")
        for name, own in seconds.items():
            ratios = [mine / chain for mine, chain in zip(own, seconds["chain"], strict=True)]
            print(
                f"  {name:12s} {1e3 * median(own):7.1f} ms  {median(ratios):.3f} "
                f"[{min(ratios):.3f} .. {max(ratios):.3f}] of the chain's"
            )


if __name__ == "__main__":
    sys.exit(main())
