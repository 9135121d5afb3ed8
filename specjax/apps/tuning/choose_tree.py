"""Choice of the token tree that is fastest on this machine, from measured costs and acceptance."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specjax.apps.tuning import measure_costs, round_seconds
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
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError, shown
from specjax.loading.model import Model
from specjax.methods.acceptance_rates import known_acceptance
from specjax.trees import FastestTree, RankedTree, Rates, best_tree, fastest_tree

_WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""The widths that are timed; for any other width, the cost of the next wider one is used."""
_CONTEXT = 256
_JOINED = {Turns: take_turns, Merged: merge_drafters}


@dataclass(frozen=True)
class TreeCosts:
    """Measured seconds of a draft's first level, of each further level, and of rounds by width.

    `passes` are the seconds of a round without drafting (pass, verification and commit) for each of
    `widths`, made non-decreasing.
    """

    widths: tuple[int, ...]
    passes: tuple[float, ...]
    first_level: float
    further_level: float

    def pass_seconds(self, width: int) -> float:
        """Return the seconds of a round, excluding drafting, whose pass has `width` slots.

        This is the time of the narrowest timed width of at least `width`. Raises InputError if
        there is none.
        """
        if width > self.widths[-1]:
            raise InputError(
                f"width={width}: passes of at most {self.widths[-1]} slots were timed; use a tree "
                f"of at most {self.widths[-1] - 1} nodes"
            )
        return self.passes[bisect.bisect_left(self.widths, width)]

    def draft_seconds(self, depth: int) -> float:
        """Return the seconds of a draft with `depth` levels."""
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
    """Measure rounds, and drafts of 1 and of `depth` levels, in rows of `context` tokens.

    `tell` is called with a progress line before timing starts. Raises InputError for a drafter
    without trees, and if the target has no room for one.
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
    # All processes must choose the same tree.
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
    """Return the static tree with the most tokens per second, and its predicted speed.

    `drafter` has a `tree` field, and `acceptance` are its rates by depth and rank (`measure_ranks`,
    `known_acceptance`). Paths are no longer than `max_depth` or the drafter's own limit, and trees
    have at most `max_nodes` nodes; `options` are those of `measure_tree_costs`: `batch_size`,
    `context` and `tell`. A tree without nodes means that no draft pays off. Raises InputError as
    `measure_tree_costs` does.
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
    """Return the drafter with the fastest tree of each part that can draft one, and those trees.

    Each tree is the fastest for its part alone, even if parts draft together. `tree` limits the
    sizes, and `path` is the argument of `make_drafter`. `acceptance` maps the names of parts to
    rates; by default they are read from NAME.ranks.json at `path` or beside the bundled head, or
    are the drafter's `usual_acceptance`. `options` are those of `choose_tree`. Raises InputError as
    `choose_tree` does, if no part drafts trees, and if rates are unknown.
    """
    trees: dict[str, FastestTree] = {}
    tell = options.get("tell", lambda line: None)

    def rates_of(part: LoadedDrafter) -> Rates:
        name = part.name
        if acceptance is not None and name in acceptance:
            return acceptance[name]
        head = path if name in TRAINED else None
        if (rates := known_acceptance(name, target, head)) is not None:
            return rates
        if (rates := getattr(part.drafter, "usual_acceptance", None)) is not None:
            tell(f"{name}: its usual acceptance rates are taken; no measured ones are kept")
            return rates
        missing = ""
        if head is not None:
            beside = head.name if isinstance(head, Model) else os.fspath(head)
            missing = f": no {name}.ranks.json is beside drafter.path={shown(beside)}"
        raise InputError(
            f"tree.kind=auto: how often {name}'s candidates are accepted by {target.name} is not "
            f"known{missing}; measure it (scripts/calibrate_trees.py), or use tree.kind=static"
        )

    def chosen(part: LoadedDrafter) -> LoadedDrafter:
        for kind, join in _JOINED.items():
            if isinstance(part.drafter, kind):
                each = zip(part.drafter.parts, part.params, strict=True)
                return join(*(chosen(LoadedDrafter(*fields)) for fields in each))
        if not hasattr(part.drafter, "tree"):
            return part
        rates = rates_of(part)
        trees[part.name] = choose_tree(
            target,
            part,
            [level[: tree.topk] for level in rates],
            max_depth=tree.depth,
            max_nodes=tree.num_nodes,
            **options,
        )
        return with_tree(part, trees[part.name].tree)

    made = chosen(drafter)
    if not trees:
        raise InputError(
            f"tree.kind=auto: {drafter.name} drafts no trees of candidates; leave it out"
        )
    return made, trees


def with_tree(drafter: LoadedDrafter, tree: RankedTree) -> LoadedDrafter:
    """Return the drafter with a static tree, and drafts as long as its longest path.

    If the tree is a chain, so are the drafts.
    """
    shape = tree.topology
    fields = {"tree": None if shape.is_chain else tree, "num_speculative_tokens": shape.depth}
    return drafter._replace(drafter=replace(drafter.drafter, **fields))


def _likely_tree(depth: int, topk: int = 8) -> RankedTree:
    """Return a tree as wide as the widest timed pass, for drafters with typical rates.

    Each candidate is taken to be half as likely as the one before. The tree has at most `depth`
    levels, or fewer if nodes of other levels are likelier.
    """
    return best_tree([[0.5 ** (rank + 1) for rank in range(topk)]] * depth, max(_WIDTHS) - 1)


def _measure(
    target: Model, drafter: LoadedDrafter, batch_size: int, context: int, deepest: int
) -> tuple[float, ...]:
    """Return the seconds of rounds of `_WIDTHS` without drafts, and of two drafts.

    The drafts have one level, and up to `deepest` levels.
    """
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
            *plan_requests(
                target,
                prompts,
                drafter=with_tree(drafter, tree),
                options=DecodeOptions(batch_size=batch_size),
                sampling=SamplingParams(max_new_tokens=deepest + 1),
            )
        )
        for tree in trees
    ]
    return (*passes.values(), *drafts)
