"""Chains, static and dynamic trees of a drafter side by side: expected, and measured.

    python scripts/compare_trees.py --prompts=FILE --drafter=eagle3 --batch_size=1

Decodes the same prompts plainly, with chains, with static and dynamic trees of several sizes, and
with those that `tree.kind=auto` chooses, all with fixed lengths, in turn, several times over; each
turn begins with the next of them. Where rows are sampled, chains and static trees are drafted
twice: drawn, and of the likeliest tokens.

What is expected of a static tree comes from the drafter's rates
(`specjax.loading.acceptance_rates`) and from rounds and drafts that are timed before each turn
(`specjax.tuning.measure_tree_costs`), as a machine may be quicker at one time than at another; the
medians count. What `auto` chooses comes from costs that are timed once, at the start, or were kept
by a run in the last ten minutes, as in decoding; so do the second table's columns for other numbers
of rows. Nothing is expected of dynamic trees, of rows that are sampled, and of drafters without
rates, whose trees are those of rates that halve by rank. Speeds are without prefill: tokens per
round over the median of seconds per round.

A second table has tokens/s without that noise, for several numbers of rows: measured tokens per
round, which are the same for any of them, over those timed rounds and drafts (a dynamic tree's are
taken to be those of a static one); and how far what `auto` chooses for so many rows is below the
best. Greedy tokens must be those of plain decoding. Exit codes: 0; 1 where they are not; 2 for bad
input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from specjax.cli import command
from specjax.cli.built_in_prompts import questions_of
from specjax.cli.flags import Listed, Parser
from specjax.decoding.generate import decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.prompts import encode_prompt, spread
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import Session, plan_session
from specjax.drafters import LoadedDrafter, make_drafter
from specjax.errors import InputError
from specjax.fields import InputFile, Number, PathOrName, Text, Whole, optional
from specjax.loading.acceptance_rates import shipped_acceptance
from specjax.loading.load import DEFAULT_MODEL, load_model
from specjax.loading.model import Model
from specjax.trees import DynamicTree, RankedTree, best_tree
from specjax.tuning import TreeCosts, choose_tree, measure_tree_costs, with_tree

_DEPTH = 5
"""Levels of trees of a drafter whose rates are not known."""
_METHODS = {"probabilistic": "drawn", "greedy": "likeliest"}


class Shape(NamedTuple):
    """What is drafted: nodes and levels, and the tokens per round expected, if any are."""

    name: str
    drafter: LoadedDrafter | None
    nodes: int
    levels: int
    expected_tokens: float | None = None

    def seconds(self, costs: TreeCosts) -> float:
        """Of a round, by what was timed."""
        drafting = costs.draft_seconds(self.levels) if self.levels else 0.0
        return costs.pass_seconds(1 + self.nodes) + drafting


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
        """What each row makes."""
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
    flags.add_field("drafter", Text(), "a drafter of trees", default="eagle3")
    flags.add_field("batch_size", Whole(1), "rows that are decoded together", default=1)
    flags.add_field("batch_sizes", Listed(Whole(1)), "rows of the second table", default=(1, 4, 16))
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
    batch_sizes: Sequence[int],
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
    known = rates is not None
    if rates is None:
        rates = [[0.5 ** (rank + 1) for rank in range(topk)]] * _DEPTH
    deepest = min(len(rates), getattr(made.drafter, "longest_path", None) or len(rates))
    if max(chains, default=0) > deepest:
        raise InputError(
            f"chains={','.join(map(str, chains))}: {drafter} drafts {deepest} levels here; use "
            "shorter ones"
        )

    def tell(line: str) -> None:
        print(line, flush=True)

    costs, choices = {}, {}
    for rows in dict.fromkeys((batch_size, *batch_sizes)):
        costs[rows] = measure_tree_costs(model, made, depth=deepest, batch_size=rows, tell=tell)
        if known:
            choices[rows] = choose_tree(model, made, rates, max_depth=deepest, batch_size=rows)
    trees = {
        **{f"chain of {n}": best_tree([level[:1] for level in rates], n) for n in chains},
        **{f"static, {size} nodes": best_tree(rates, size, deepest) for size in nodes},
    }
    for rows, chosen in choices.items():
        if chosen.tree.topology.num_nodes and chosen.tree not in trees.values():
            trees[f"`auto`'s choice, B = {rows}"] = chosen.tree
    expected_of = rates if known and temperature == 0 else None
    shapes = [Shape("plain", None, 0, 0)]
    for name, tree in trees.items():
        if temperature == 0:
            shapes.append(_static(name, made, tree, expected_of))
            continue
        for method in ("probabilistic", "greedy"):
            drawn = made._replace(drafter=replace(made.drafter, draft_sample_method=method))
            shapes.append(_static(f"{name}, {_METHODS[method]}", drawn, tree, None))
    for size in nodes:
        tree = DynamicTree(topk, deepest, size)
        fields = {"tree": tree, "num_speculative_tokens": deepest}
        dynamic = made._replace(drafter=replace(made.drafter, **fields))
        shapes.append(Shape(f"dynamic, {size} nodes", dynamic, size, deepest))
    questions = questions_of(prompts)
    ids = [encode_prompt(model, question.first_turn) for question in spread(questions, limit)]
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new_tokens)
    sessions = [_session(model, ids, shape.drafter, sampling, batch_size) for shape in shapes]

    def timed() -> TreeCosts:
        return measure_tree_costs(model, made, depth=deepest, batch_size=batch_size)

    runs, costs[batch_size] = _measure(sessions, repeats, timed)
    print(
        f"\n{drafter}, B = {batch_size}, temperature {temperature:g}, {len(ids)} prompts, "
        f"{new_tokens} tokens, {repeats} turns; ms of a round, tokens/s of a row\n"
    )
    _print_measured(shapes, runs, costs[batch_size])
    print("\ntokens/s of a row by measured tau, timed rounds and drafts\n")
    chosen_names = {
        rows: next((name for name, tree in trees.items() if tree == chosen.tree), "plain")
        for rows, chosen in choices.items()
        if temperature == 0
    }
    _print_replayed(shapes, runs, {rows: costs[rows] for rows in batch_sizes}, chosen_names)
    if temperature == 0 and any(run.answers != runs[0].answers for run in runs):
        print("tokens differ from those of plain decoding")
        return 1
    return 0


def _static(
    name: str,
    drafter: LoadedDrafter,
    tree: RankedTree,
    rates: Sequence[Sequence[float]] | None,
) -> Shape:
    """A static tree or a chain; with rates, what is expected of it."""
    topology = tree.topology
    tokens = None if rates is None else tree.expected_tokens(rates)
    return Shape(name, with_tree(drafter, tree), topology.num_nodes, topology.depth, tokens)


def _session(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafter: LoadedDrafter | None,
    sampling: SamplingParams,
    batch_size: int,
) -> Session:
    options = DecodeOptions(batch_size=batch_size)
    return plan_session(model, ids, drafter=drafter, options=options, requests=sampling)


def _measure(
    sessions: Sequence[Session], repeats: int, timed: Callable[[], TreeCosts]
) -> tuple[list[Runs], TreeCosts]:
    """Each session's runs, and the costs by the medians of what was `timed` before each turn.

    A first turn compiles and does not count.
    """
    costs = []
    engines = [open_engine(session) for session in sessions]
    runs = [Runs() for _ in sessions]
    for turn in range(repeats + 1):
        if turn:
            costs.append(timed())
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
    return runs, _medians(costs)


def _medians(costs: Sequence[TreeCosts]) -> TreeCosts:
    """Each figure's median."""
    return TreeCosts(
        widths=costs[0].widths,
        passes=tuple(map(median, zip(*(one.passes for one in costs), strict=True))),
        first_level=median(one.first_level for one in costs),
        further_level=median(one.further_level for one in costs),
    )


def _print_measured(shapes: Sequence[Shape], runs: Sequence[Runs], costs: TreeCosts) -> None:
    """What was measured beside what was expected."""
    print(
        "| draft | nodes | levels | tau | expected tau | ms | expected ms | tokens/s | "
        "expected tokens/s | / plain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors = []
    for shape, run in zip(shapes, runs, strict=True):
        tau, ms, speed = "", "", ""
        if shape.expected_tokens is not None:
            expected = shape.expected_tokens / shape.seconds(costs)
            errors.append(abs(expected / run.row_tokens_per_second - 1))
            tau, speed = f"{shape.expected_tokens:.2f}", f"{expected:.1f}"
            ms = f"{1e3 * shape.seconds(costs):.0f}"
        gain = run.row_tokens_per_second / runs[0].row_tokens_per_second
        print(
            f"| {shape.name} | {shape.nodes} | {shape.levels} | {run.tokens_per_round:.2f} | {tau} "
            f"| {1e3 * run.round_seconds:.0f} | {ms} | {run.row_tokens_per_second:.1f} | {speed} "
            f"| {gain:.2f}x |"
        )
    if errors:
        off = f"{median(errors):.1%} off in the median, {max(errors):.1%} at most"
        print(f"\nexpected tokens/s are {off}")


def _print_replayed(
    shapes: Sequence[Shape],
    runs: Sequence[Runs],
    costs: Mapping[int, TreeCosts],
    choices: Mapping[int, str],
) -> None:
    """Tokens/s by measured tokens per round and timed seconds, a column for each number of rows."""
    print(f"| draft | {' | '.join(f'B = {rows}' for rows in costs)} |")
    print(f"|---{'|---' * len(costs)}|")
    speeds = {
        rows: {
            shape.name: run.tokens_per_round / shape.seconds(timed)
            for shape, run in zip(shapes, runs, strict=True)
        }
        for rows, timed in costs.items()
    }
    for shape in shapes:
        print(
            f"| {shape.name} | {' | '.join(f'{speeds[rows][shape.name]:.1f}' for rows in costs)} |"
        )
    for rows, speed in speeds.items():
        if rows in choices:
            best = max(speed, key=speed.get)
            loss = 1 - speed[choices[rows]] / speed[best]
            print(f"\nB = {rows}: `auto` chose {choices[rows]}, {loss:.1%} below the best, {best}")


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
