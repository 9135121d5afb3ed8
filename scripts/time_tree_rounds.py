"""What a round over a token tree costs beside a round over a chain of as many nodes.

    python scripts/time_tree_rounds.py --nodes=32 --batch_size=1

Drafts are constant tokens, so that drafting costs nothing and every round has all nodes: of a
chain, of a static tree, and of a dynamic one of the same shape. Each is decoded in turn, several
times, greedily and at temperature 1, with the default model. Printed are the medians of seconds per
round, and the medians, the least and the largest of the ratios to the chain's of the same turn.
Exit codes: 0; 2 for bad input.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

import specjax
from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.drafters import Context, Drafter, Noise
from specjax.drafters.growth.options import usual_rates
from specjax.fields import Whole
from specjax.trees import Draft, DynamicTopology, Topology, best_tree

_PROMPT = "Write a short story about a lighthouse."
_TOKEN = 28


@dataclass(frozen=True, kw_only=True)
class Constant(Drafter):
    """A tree of one token again and again."""

    topology: Topology
    dynamic: bool = False
    num_speculative_tokens: Annotated[int, Whole(1)] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_speculative_tokens", self.topology.depth)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.topology.num_nodes

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every draft has all nodes."""
        return (self.num_nodes,)

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """The same in each round."""
        del params, noise
        shape = (context.length.shape[0], self.num_nodes)
        valid = jnp.asarray(self.topology.depths[1:])[None] <= context.limit[:, None]
        topology = self.topology
        if self.dynamic:
            parents = jnp.broadcast_to(jnp.asarray(topology.parents, jnp.int32), shape)
            topology = DynamicTopology(parents, topology.depth)
        tokens = jnp.full(shape, _TOKEN, jnp.int32)
        # Siblings are distinct.
        tokens += jnp.asarray(np.arange(self.num_nodes), jnp.int32)[None]
        return Draft(tokens, valid, jnp.full(shape, -1, jnp.int32), None, topology), state


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _measure(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/time_tree_rounds.py", __doc__)
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
        "chain": Constant(topology=Topology(tuple(range(nodes)))),
        "static tree": Constant(topology=tree),
        "dynamic tree": Constant(topology=tree, dynamic=True),
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
