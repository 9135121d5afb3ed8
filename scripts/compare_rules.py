"""Compare how many tokens `rejection` and `block` accept on the same trees.

    python scripts/compare_rules.py --drafters=eagle3,draft_model [--prompts=FILE.jsonl]

Decodes prompts by rejection sampling, with one static tree for all drafters. For each pass of the
target it computes what either rule accepts in expectation, given the target's distributions and
the drafted tokens, by a recursion of its own in float64; so the difference has no noise of the
rules' own draws. Prompts are read from a JSONL file in Spec-Bench's format, by default bundled
ones. Prints the tokens per pass of both rules and the gain, with a 95 % interval by resampling
prompts. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibrate_trees import PROMPTS
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.apps.playground.replay_round import verify_and_keep
from specjax.core.verify import as_drafted
from specjax.drafters import TreeOptions, make_drafter
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.programs import row_arguments, start
from specjax.engine.programs import run as run_rounds
from specjax.engine.requests import Request, SamplingParams, groups
from specjax.fields import InputFile, Number, PathOrName, Text, Whole
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import load_model
from specjax.loading.texts.questions import read_questions, select
from specjax.sampling.multipath import takes_all

CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
"""The tree: ten nodes and three levels."""
_RESAMPLED = 2_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/compare_rules.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    drafters: Annotated[tuple[str, ...] | str, Listed(Text())]
    """Drafters that draw trees, by name."""
    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model."""
    prompts: Annotated[Path, InputFile()] = PROMPTS
    """A JSONL file in Spec-Bench's format."""
    per_task: Annotated[int, Whole(1)] = 2
    """The number of prompts of each task."""
    longest_prompt: Annotated[int, Whole(1)] = 512
    """The number of tokens after which prompts are cut off."""
    max_new_tokens: Annotated[int, Whole(1)] = 96
    """The maximum number of tokens of an answer."""
    temperature: Annotated[float, Number(1e-3, 1e3)] = 1.0
    """The temperature of target and drafter."""
    batch_size: Annotated[int, Whole(1)] = 4
    """Rows that decode together."""


def run(flags: Flags) -> int:
    """Compare the rules for each drafter, print a line each; return the exit code."""
    model = load_model(flags.target)
    questions = select(read_questions(flags.prompts), per_task=flags.per_task)
    prompts = [
        model.tokenizer.encode_chat(question.first_turn)[: flags.longest_prompt]
        for question in questions
    ]
    for name in flags.drafters:
        drafter = make_drafter(name, model, tree=TreeOptions(kind="static", choices=CHOICES))
        plan, requests = plan_requests(
            model,
            prompts,
            drafter=drafter,
            options=DecodeOptions(batch_size=flags.batch_size),
            sampling=SamplingParams(
                temperature=flags.temperature, max_new_tokens=flags.max_new_tokens
            ),
        )
        print(f"{name}: compiling", flush=True)
        by_prompt = [np.array(lengths) for lengths in _compared(name, plan, requests)]
        print(_line(name, [lengths for lengths in by_prompt if len(lengths)]), flush=True)
    return 0


def _compared(
    name: str, plan: DecodePlan, requests: Sequence[Request]
) -> Iterator[list[tuple[float, float]]]:
    """Yield, for each request, the tokens per pass of both rules in each of its passes."""
    loop_plan, params = plan.loop, plan.params
    limits = jax.tree.map(jnp.asarray, loop_plan.drafter.full_limits())
    for batch in groups(requests, plan.options.batch_size):
        state = start(loop_plan, params, *row_arguments(plan, batch))
        lengths: list[list[tuple[float, float]]] = [[] for _ in batch]
        while (active := np.asarray(state.active)[: len(batch)]).any():
            draft, kept = verify_and_keep(loop_plan, params, state, limits)
            drafted = as_drafted(draft, draft.topology)
            arrays = drafted.tokens, drafted.valid, drafted.logq_row, takes_all(drafted)
            for row in np.flatnonzero(active):
                tokens, valid, logq_row, full = (np.asarray(array[row]) for array in arrays)
                p, q = (np.exp(np.asarray(each[row], float)) for each in (kept.target, draft.logq))
                nodes = [
                    Node(parent, int(token), q[source], bool(all_of_it))
                    for parent, token, source, all_of_it, there in zip(
                        draft.topology.parents, tokens, logq_row, full, valid, strict=True
                    )
                    if there
                ]
                lengths[row].append((1 + by_rejection(p, nodes), 1 + by_block(p, nodes)))
            state, *_ = run_rounds(loop_plan, params, state, np.int32(1))
        print(f"{name}: {batch[-1].number + 1} of {len(requests)} prompts", flush=True)
        yield from lengths


class Node(NamedTuple):
    """A drafted node: its parent's slot, its token, the q it was drawn from, and `takes_all`."""

    parent: int
    token: int
    q: Float[np.ndarray, V]
    takes_all: bool


def by_rejection(p: Float[np.ndarray, "W V"], nodes: Sequence[Node], slot: int = 0) -> float:
    """Return the expected number of nodes below `slot` that `rejection` accepts.

    `p` are the target's distributions by slot, and node i is in slot i + 1.
    """
    left, drawn, reached, expected = p[slot], [], 1.0, 0.0
    for child, node in _children(nodes, slot):
        q = _without(node.q, drawn)
        accepted = reached * min(1.0, left[node.token] / q[node.token])
        expected += accepted * (1 + by_rejection(p, nodes, child))
        reached -= accepted
        left, drawn = _normalized(np.maximum(left - q, 0), left), [*drawn, node.token]
    return expected


def by_block(p: Float[np.ndarray, "W V"], nodes: Sequence[Node]) -> float:
    """Return the expected number of nodes that `block` accepts; arguments as `by_rejection`."""
    open_, expected = 1.0, 0.0
    for depth, height in _heights(p, nodes, 0, 0, 1.0):
        expected += open_ * height * depth
        open_ *= 1 - height
    return expected


def _heights(
    p: Float[np.ndarray, "W V"], nodes: Sequence[Node], slot: int, depth: int, weight: float
) -> Iterator[tuple[int, float]]:
    """Yield the depth and height of each node in postorder, `slot` and its own `weight` last."""
    left, drawn = p[slot], []
    for child, node in _children(nodes, slot):
        q = _without(node.q, drawn)
        odds = left[node.token] / q[node.token]
        share = min(1.0, weight * odds) if node.takes_all else weight * min(1.0, odds)
        yield from _heights(p, nodes, child, depth + 1, share)
        beyond = np.maximum((weight if node.takes_all else 1.0) * left - q, 0)
        if node.takes_all:
            mass = beyond.sum()
            weight = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
        else:
            weight = (weight - share) / (1 - share) if share < 1 else 1.0
        left, drawn = _normalized(beyond, left), [*drawn, node.token]
    yield depth, weight


def _children(nodes: Sequence[Node], slot: int) -> list[tuple[int, Node]]:
    return [(at, node) for at, node in enumerate(nodes, start=1) if node.parent == slot]


def _without(q: Float[np.ndarray, V], drawn: list[int]) -> Float[np.ndarray, V]:
    """Return q after tokens were drawn from it without replacement."""
    q = q.copy()
    q[drawn] = 0
    return q / q.sum()


def _normalized(
    mass: Float[np.ndarray, V], otherwise: Float[np.ndarray, V]
) -> Float[np.ndarray, V]:
    return mass / total if (total := mass.sum()) > 0 else otherwise


def _line(name: str, by_prompt: Sequence[Float[np.ndarray, "passes 2"]]) -> str:
    """Return the means over all passes, and the gain with its interval by resampled prompts."""
    sums = np.array([lengths.sum(axis=0) for lengths in by_prompt])
    passes = np.array([len(lengths) for lengths in by_prompt])
    chosen = np.random.default_rng(0).integers(len(passes), size=(_RESAMPLED, len(passes)))
    gains = np.diff(sums[chosen].sum(axis=1), axis=1)[:, 0] / passes[chosen].sum(axis=1)
    low, high = np.quantile(gains, (0.025, 0.975))
    rejection, block = sums.sum(axis=0) / passes.sum()
    gain = block - rejection
    return (
        f"{name}: {len(passes)} prompts, {passes.sum()} passes, rejection {rejection:.3f}, "
        f"block {block:.3f}, gain {gain:.3f} [{low:.3f}, {high:.3f}] ({gain / rejection:.1%})"
    )


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
