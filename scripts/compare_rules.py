"""Compare how many tokens `rejection` and `block` accept on the same trees.

    python scripts/compare_rules.py --drafters=eagle3,draft_model [--prompts=FILE.jsonl]

Decodes prompts by rejection sampling, with one static tree for all drafters. For each pass of the
target it computes what either rule accepts in expectation, given the target's distributions and
the drafted tokens, by closed formulas in float64 (`lib/tree_rules.py`); so the difference has no
noise of the rules' own draws. Prompts are read from a JSONL file in Spec-Bench's format, by default
bundled ones. Prints the tokens per pass of both rules and the gain, with a 95 % interval by
resampling prompts. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from calibrate_trees import PROMPTS
from lib.tree_rules import leaf_first, rejection, with_draws
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
from specjax.sampling import multipath

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
            topology = draft.topology
            takes_all = multipath.takes_all(drafted)[0]
            for row in np.flatnonzero(active):
                tokens, valid, rows = (
                    np.asarray(array[row])
                    for array in (drafted.tokens, drafted.valid, drafted.logq_row)
                )
                p = np.exp(np.asarray(kept.target[row], float))
                logq = np.asarray(draft.logq[row], float)
                trees = with_draws(
                    topology.parents, tokens[None], valid[None], p[None], logq[None], rows
                )
                by_rejection, by_block = (
                    float(ends.lengths(topology)[0])
                    for ends in (rejection(trees), leaf_first(trees, takes_all))
                )
                lengths[row].append((1 + by_rejection, 1 + by_block))
            state, *_ = run_rounds(loop_plan, params, state, np.int32(1))
        print(f"{name}: {batch[-1].number + 1} of {len(requests)} prompts", flush=True)
        yield from lengths


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
