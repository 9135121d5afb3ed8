"""The token tree that is fastest on this machine, by measured costs and acceptance."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specjax.decoding.options import DecodeOptions
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import plan_session
from specjax.distributed import processes, sharding
from specjax.drafters import (
    TRAINED,
    LoadedDrafter,
    Merged,
    TreeOptions,
    Turns,
    merge_drafters,
    take_turns,
)
from specjax.errors import InputError, shown
from specjax.loading.acceptance_rates import known_acceptance
from specjax.loading.model import Model
from specjax.trees import FastestTree, RankedTree, Rates, best_tree, fastest_tree
from specjax.tuning import measure_costs, round_seconds

_WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""Slots of the passes that are timed; those between take what the next wider one does."""
_CONTEXT = 256
_JOINED = {Turns: take_turns, Merged: merge_drafters}


@dataclass(frozen=True)
class TreeCosts:
    """Seconds here: of a draft's first level and each further one, and of rounds but for drafts.

    `passes` are those of rounds, by the slots of their pass: the pass, verifying and committing. No
    wider one takes less.
    """

    widths: tuple[int, ...]
    passes: tuple[float, ...]
    first_level: float
    further_level: float

    def pass_seconds(self, width: int) -> float:
        """Of a round but for its draft, by its slots: that of the next wider one that was timed.

        Raises InputError for a pass that is wider than all of them.
        """
        if width > self.widths[-1]:
            raise InputError(
                f"width={width}: passes of at most {self.widths[-1]} slots were timed; use a tree "
                f"of at most {self.widths[-1] - 1} nodes"
            )
        return self.passes[bisect.bisect_left(self.widths, width)]

    def draft_seconds(self, depth: int) -> float:
        """Of a draft of so many levels."""
        return self.first_level + self.further_level * (depth - 1)


def measure_tree_costs(
    target: Model,
    drafter: LoadedDrafter,
    *,
    depth: int,
    batch_size: int = 1,
    context: int = _CONTEXT,
    tell: Callable[[str], Any] = lambda line: None,
) -> TreeCosts:
    """What rounds take, and drafts of one level and of `depth`, with rows of `context` tokens.

    `tell` is called with a line before anything is timed. Raises InputError for a drafter without
    trees, and where the target has no room for one.
    """
    if not hasattr(drafter.drafter, "tree"):
        raise InputError(
            f"drafter {drafter.name!r} drafts no trees of candidates; use one that does"
        )
    room = max(max(_WIDTHS), round_seconds.new_tokens(depth))
    context = min(context, target.config.max_positions - room)
    if context < 2:
        raise InputError(
            f"target={target.name} has {target.config.max_positions} positions: no room to time "
            f"trees of {max(_WIDTHS) - 1} nodes; use tree.kind=static"
        )
    tell(f"timing rounds and drafts of {drafter.name} ...")
    with sharding.use(target.mesh):
        seconds = _measure(target, drafter, batch_size, context, depth)
    # Several processes choose one tree.
    seconds = processes.from_first(seconds)
    passes, (first, whole) = seconds[: len(_WIDTHS)], seconds[len(_WIDTHS) :]
    return TreeCosts(
        widths=_WIDTHS,
        # A wider pass is never cheaper.
        passes=tuple(np.maximum.accumulate(passes).tolist()),
        first_level=first,
        further_level=max(whole - first, 0.0) / max(_likely_tree(depth).depth - 1, 1),
    )


def choose_tree(
    target: Model,
    drafter: LoadedDrafter,
    acceptance: Rates,
    *,
    max_depth: int | None = None,
    max_nodes: int | None = None,
    **options: Any,
) -> FastestTree:
    """The static tree with the most tokens per second, and what it is predicted to do.

    `drafter` is one with a `tree` field, and `acceptance` its chances by depth and rank
    (`measure_ranks`, `known_acceptance`). No path is longer than `max_depth`, or than the
    drafter's own limit, and no tree has more than `max_nodes` nodes; `options` are those of
    `measure_tree_costs`: `batch_size`, `context` and `tell`. A tree without nodes says that
    no draft pays. Raises InputError where `measure_tree_costs` does.
    """
    longest = [len(acceptance), max_depth, getattr(drafter.drafter, "longest_path", None)]
    deepest = min(length for length in longest if length is not None)
    times = measure_tree_costs(target, drafter, depth=deepest, **options)
    return fastest_tree(
        acceptance,
        times.pass_seconds,
        times.draft_seconds,
        widths=[width for width in times.widths if max_nodes is None or width <= 1 + max_nodes],
        max_depth=deepest,
    )


def with_fastest_trees(
    target: Model,
    drafter: LoadedDrafter,
    tree: TreeOptions,
    *,
    path: str | os.PathLike | Model | None = None,
    acceptance: Mapping[str, Rates] | None = None,
    **options: Any,
) -> tuple[LoadedDrafter, dict[str, FastestTree]]:
    """The drafter, each part that drafts candidates with its fastest tree; and what was found.

    Each one's tree is the fastest for it alone, also where parts draft together. `tree` limits
    their numbers, and `path` is what `make_drafter` was given. `acceptance` are rates by the parts'
    names, by default those in NAME.ranks.json beside what `path` names, or without one those that
    come with specjax, or the drafter's `usual_acceptance`; `options` are those of `choose_tree`.
    Raises InputError as it does, where no part drafts trees, and where rates are unknown.
    """
    found: dict[str, FastestTree] = {}
    tell = options.get("tell", lambda line: None)

    def rates_of(part: LoadedDrafter) -> Rates:
        name = part.name
        if acceptance is not None and name in acceptance:
            return acceptance[name]
        own = path if name in TRAINED else None
        if (rates := known_acceptance(name, target, own)) is not None:
            return rates
        if (rates := getattr(part.drafter, "usual_acceptance", None)) is not None:
            tell(f"{name}: its usual acceptance rates are taken; no measured ones are kept")
            return rates
        missing = ""
        if own is not None:
            beside = own.name if isinstance(own, Model) else os.fspath(own)
            missing = f": no {name}.ranks.json is beside drafter.path={shown(beside)}"
        raise InputError(
            f"tree.kind=auto: how often {name}'s candidates are accepted by {target.name} is not "
            f"known{missing}; measure it (scripts/calibrate_trees.py), or use tree.kind=static"
        )

    def chosen(part: LoadedDrafter) -> LoadedDrafter:
        for kind, join in _JOINED.items():
            if isinstance(part.drafter, kind):
                each = zip(part.drafter.parts, part.params, strict=True)
                return join(*(chosen(LoadedDrafter(*one)) for one in each))
        if not hasattr(part.drafter, "tree"):
            return part
        rates = rates_of(part)
        found[part.name] = choose_tree(
            target,
            part,
            [level[: tree.topk] for level in rates],
            max_depth=tree.depth,
            max_nodes=tree.num_nodes,
            **options,
        )
        return with_tree(part, found[part.name].tree)

    made = chosen(drafter)
    if not found:
        raise InputError(
            f"tree.kind=auto: {drafter.name} drafts no trees of candidates; leave it out"
        )
    return made, found


def with_tree(drafter: LoadedDrafter, tree: RankedTree) -> LoadedDrafter:
    """The drafter with a static tree, its longest path that of the tree; a chain stays a chain."""
    shape = tree.topology
    fields = {"tree": None if shape.is_chain else tree, "num_speculative_tokens": shape.depth}
    return drafter._replace(drafter=replace(drafter.drafter, **fields))


def _likely_tree(depth: int, topk: int = 8) -> RankedTree:
    """The tree of the widest pass in which each candidate is half as likely as the one before.

    It has at most `depth` levels, and fewer where nodes of these are likelier.
    """
    return best_tree([[0.5 ** (rank + 1) for rank in range(topk)]] * depth, max(_WIDTHS) - 1)


def _measure(
    target: Model, drafter: LoadedDrafter, batch_size: int, context: int, deepest: int
) -> tuple[float, ...]:
    """Seconds of rounds of `_WIDTHS` but for their drafts, and of drafts: a token, all levels."""
    passes = round_seconds.rounds_seconds(
        target,
        drafter.drafter,
        _likely_tree(deepest, topk=max(_WIDTHS) - 1).topology,
        _WIDTHS,
        batch_size=batch_size,
        context=context,
    )
    trees = best_tree([[0.5]], 1), _likely_tree(deepest)
    prompts = [[1] * context] * batch_size
    drafts = [
        measure_costs.propose_seconds(
            plan_session(
                target,
                prompts,
                drafter=with_tree(drafter, tree),
                options=DecodeOptions(batch_size=batch_size),
                requests=SamplingParams(max_new_tokens=deepest + 1),
            )
        )
        for tree in trees
    ]
    return (*passes.values(), *drafts)
