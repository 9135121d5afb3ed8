"""Chains, static and dynamic trees of a drafter side by side: expected, and measured.

    python scripts/compare_trees.py --prompts=FILE --drafter=eagle3 --batch_size=1

Decodes the same prompts plainly, with chains, with static and dynamic trees of several sizes, and
with the one that `tree.kind=auto` chooses, all with fixed lengths, in turn, several times over;
each turn begins with the next of them. What is expected of a static tree comes from the drafter's
rates (`specjax.loading.heads.ranks`) and from passes and drafts that are timed before
(`specjax.tuning.measure_tree_costs`); of dynamic trees, and of rows that are sampled, nothing is
expected. Speeds are without prefill: tokens per round over the median of seconds per round. Greedy
tokens must be those of plain decoding. Exit codes: 0; 1 where they are not; 2 for bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from specjax.cli import command
from specjax.cli.built_in_prompts import BUILT_IN
from specjax.cli.flags import Listed, Parser
from specjax.decoding.generate import decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import Session, plan_session
from specjax.decoding.prompts import encode_prompt, read_questions, spread
from specjax.decoding.sampling_params import SamplingParams
from specjax.drafters import LoadedDrafter, make_drafter
from specjax.errors import InputError
from specjax.fields import InputFile, Number, PathOrName, Text, Whole, optional
from specjax.loading.heads.ranks import shipped_acceptance
from specjax.loading.load import DEFAULT_MODEL, load_model
from specjax.loading.model import Model
from specjax.trees import DynamicTree, FastestTree, RankedTree, best_tree
from specjax.tuning import TreeCosts, choose_tree, measure_tree_costs, with_tree


class Shape(NamedTuple):
    """What is drafted: nodes and levels, and what is expected of them, if anything is."""

    name: str
    drafter: LoadedDrafter | None
    nodes: int
    levels: int
    expected: FastestTree | None


@dataclass
class Runs:
    """What was measured of one shape: tokens and rounds of all rows, and seconds of each turn."""

    tokens: int = 0
    row_rounds: int = 0
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens_per_round(self) -> float:
        """Of one row."""
        return self.tokens / self.row_rounds

    @property
    def round_seconds(self) -> float:
        """Of a round of all rows, in the median turn."""
        return median(self.seconds) / self.rounds

    @property
    def row_tokens_per_second(self) -> float:
        """What each row makes, as `FastestTree` expects it."""
        return self.tokens_per_round / self.round_seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        return _compare(**parser().read(arguments))

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/compare_trees.py", __doc__)
    flags.add_field("target", PathOrName(), "the model", default=DEFAULT_MODEL)
    flags.add_field("prompts", optional(InputFile()), "JSONL, Spec-Bench's schema", default=None)
    flags.add_field("limit", Whole(1), "prompts, spread over the file", default=6)
    flags.add_field("drafter", Text(), "a drafter with measured rates", default="eagle3")
    flags.add_field("batch_size", Whole(1), "rows", default=1)
    flags.add_field("chains", Listed(Whole(1, 32)), "lengths of chains", default=(2, 4))
    flags.add_field("nodes", Listed(Whole(1, 32)), "sizes of trees", default=(4, 8, 16, 32))
    flags.add_field("topk", Whole(1, 64), "children of a node, of dynamic trees", default=8)
    flags.add_field("temperature", Number(0.0), "of the target", default=0.0)
    flags.add_field("new_tokens", Whole(1), "of each row", default=48)
    flags.add_field("repeats", Whole(1), "turns", default=3)
    return flags


def _compare(
    target: str,
    prompts: Path | None,
    limit: int,
    drafter: str,
    batch_size: int,
    chains: Sequence[int],
    nodes: Sequence[int],
    topk: int,
    temperature: float,
    new_tokens: int,
    repeats: int,
) -> int:
    model = load_model(target)
    made = make_drafter(drafter, model)
    rates = shipped_acceptance(drafter, model)
    if rates is None:
        raise InputError(f"drafter={drafter!r}: its rates are not known; use eagle3 or medusa")
    deepest = min(len(rates), made.drafter.longest_path or len(rates))
    if max(chains, default=0) > deepest:
        raise InputError(
            f"chains={','.join(map(str, chains))}: {drafter} has rates for {deepest} levels; use "
            "shorter ones"
        )
    options = {"batch_size": batch_size, "tell": lambda line: print(line, flush=True)}
    costs = measure_tree_costs(model, made, depth=deepest, **options)
    chosen = choose_tree(model, made, rates, max_depth=deepest, **options)
    shapes = [Shape("plain", None, 0, 0, None)]
    for length in chains:
        chain = best_tree([level[:1] for level in rates], length)
        shapes.append(_static(f"chain of {length}", made, chain, rates, costs))
    for size in nodes:
        one = best_tree(rates, size, deepest)
        shapes.append(_static(f"static, {size} nodes", made, one, rates, costs))
    for size in nodes:
        tree = DynamicTree(topk, deepest, size)
        fields = {"tree": tree, "num_speculative_tokens": deepest}
        dynamic = made._replace(drafter=replace(made.drafter, **fields))
        shapes.append(Shape(f"dynamic, {size} nodes", dynamic, size, deepest, None))
    if chosen.tree.topology.num_nodes:
        shapes.append(_static("`auto`'s choice", made, chosen.tree, rates, costs))
    if temperature > 0:
        # Rates are those of greedy rows.
        shapes = [shape._replace(expected=None) for shape in shapes]
    questions = read_questions(prompts) if prompts is not None else list(BUILT_IN)
    ids = [
        encode_prompt(model, [{"role": "user", "content": question.turns[0]}])
        for question in spread(questions, limit)
    ]
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens)
    sessions = [_session(model, ids, shape.drafter, sampling, batch_size) for shape in shapes]
    runs = _measure(sessions, repeats)
    plain = runs[0]
    print(
        f"\n{drafter}, B = {batch_size}, temperature {temperature:g}, {len(ids)} prompts, "
        f"{new_tokens} tokens, {repeats} turns; ms of a round, tokens/s of a row\n"
    )
    print(
        "| draft | nodes | levels | tau | expected tau | ms | expected ms | tokens/s | "
        "expected tokens/s | / plain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape, run in zip(shapes, runs, strict=True):
        print(_line(shape, run, plain))
    best = max(runs, key=lambda run: run.row_tokens_per_second)
    own = runs[-1] if chosen.tree.topology.num_nodes else plain
    loss = 1 - own.row_tokens_per_second / best.row_tokens_per_second
    print(f"\n`auto` chose {chosen}: {loss:.1%} below the fastest, {_name(shapes, runs, best)}")
    errors = [
        abs(shape.expected.row_tokens_per_second / run.row_tokens_per_second - 1)
        for shape, run in zip(shapes, runs, strict=True)
        if shape.expected is not None
    ]
    if errors:
        off = f"{median(errors):.1%} off in the median, {max(errors):.1%} at most"
        print(f"expected tokens/s are {off}")
    if temperature == 0 and any(run.answers != plain.answers for run in runs):
        print("tokens differ from those of plain decoding")
        return 1
    return 0


def _static(
    name: str,
    drafter: LoadedDrafter,
    tree: RankedTree,
    rates: Sequence[Sequence[float]],
    costs: TreeCosts,
) -> Shape:
    """A static tree or a chain, with what is expected of it."""
    topology = tree.topology
    seconds = costs.pass_seconds(topology.width) + costs.draft_seconds(topology.depth)
    expected = FastestTree(tree, tree.expected_tokens(rates), seconds)
    drafts = with_tree(drafter, tree)
    return Shape(name, drafts, topology.num_nodes, topology.depth, expected)


def _session(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafter: LoadedDrafter | None,
    sampling: SamplingParams,
    batch_size: int,
) -> Session:
    options = DecodeOptions(batch_size=batch_size)
    return plan_session(model, ids, drafter=drafter, options=options, requests=sampling)


def _measure(sessions: Sequence[Session], repeats: int) -> list[Runs]:
    """Each session's runs; a first turn compiles and does not count."""
    engines = [open_engine(session) for session in sessions]
    runs = [Runs() for _ in sessions]
    for turn in range(repeats + 1):
        for at in np.roll(range(len(sessions)), -turn):
            before = engines[at].statistics.rounds
            made = decode_session(sessions[at], engine=engines[at])
            run = runs[at]
            run.answers = tuple(map(tuple, made.token_ids))
            run.tokens, run.row_rounds = made.new_tokens, int((made.emitted > 0).sum())
            run.rounds = engines[at].statistics.rounds - before
            if turn:
                run.seconds.append(made.decode_s)
        print(f"turn {turn} of {repeats}", flush=True)
    return runs


def _line(shape: Shape, run: Runs, plain: Runs) -> str:
    expected = ("", "", "")
    if (one := shape.expected) is not None:
        expected = (
            f"{one.tokens_per_round:.2f}",
            f"{1e3 * one.round_seconds:.0f}",
            f"{one.row_tokens_per_second:.1f}",
        )
    gain = run.row_tokens_per_second / plain.row_tokens_per_second
    return (
        f"| {shape.name} | {shape.nodes} | {shape.levels} | {run.tokens_per_round:.2f} | "
        f"{expected[0]} | {1e3 * run.round_seconds:.0f} | {expected[1]} | "
        f"{run.row_tokens_per_second:.1f} | {expected[2]} | {gain:.2f}x |"
    )


def _name(shapes: Sequence[Shape], runs: Sequence[Runs], run: Runs) -> str:
    return next(shape.name for shape, one in zip(shapes, runs, strict=True) if one is run)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
