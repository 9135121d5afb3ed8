"""Compare what rules accept of small trees with the most that any exact rule can accept.

    python scripts/bound_acceptance.py [--replace] [--smoke]

Takes every ordered tree of up to `--nodes` nodes whose slots have at most V children, with random p
and q of six kinds that are new in every context, and enumerates every draft in float64. Prints, as
Markdown, the mean number of accepted tokens of each rule; of the best exact rule, which is a linear
program (`lib/best_acceptance.py`); and of optimal transport, which needs p after tokens that were
not drafted. Rules are computed by closed formulas (`lib/tree_rules.py`), whose outputs must have
the target's distribution to 1e-10. For one pair of p and q of each kind, `rejection` and `block` of
specjax are enumerated beside them. A second table says by how much the bound is lower for a rule
that cannot see p outside the tree. Exit codes: 0; 1 if a check fails; 2 for bad input; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Float

from lib.best_acceptance import Paths, drafted_paths, mean_optimum, optimum, transport
from lib.tree_rules import (
    Ends,
    Trees,
    coupled_length,
    drawn_trees,
    hierarchical,
    largest_first,
    leaf_first,
    likelier_first,
    normalized,
    rejection,
    takes_all,
    trees_of,
)
from specjax import sampling
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import run_flags
from specjax.fields import Flag, Whole
from specjax.testing import DistributionPair
from specjax.testing.enumeration import (
    Drafts,
    Outcomes,
    Table,
    decisions,
    output_distributions,
    target_distributions,
)
from specjax.testing.rule_check import TOLERANCE, decision_function
from specjax.trees import Topology

KINDS = {
    "random": (1.0, 1.0, 0.0),
    "sharp": (0.3, 1.0, 0.0),
    "flat": (5.0, 1.0, 0.0),
    "zeros": (1.0, 0.6, 0.0),
    "near": (1.0, 1.0, 0.5),
    "sharp, near": (0.3, 1.0, 0.5),
}
"""Kinds of random p and q: the concentration of the Dirichlet distribution that both are drawn
from, the fraction of tokens that have a probability at all, and the share of p in q."""
_LEAST = 0.01
"""The probability below which a token gets none, so that linear programs are well conditioned."""


class ByFormula(NamedTuple):
    """A rule: the order in which it tests siblings, as drawn by default, and where paths end."""

    ends: Callable[[Trees, Topology], Ends]
    order: Callable[[Trees], Trees] = lambda trees: trees


RULES = {
    "rejection": ByFormula(lambda trees, topology: rejection(trees)),
    "HSD": ByFormula(lambda trees, topology: hierarchical(trees)),
    "traversal": ByFormula(lambda trees, topology: leaf_first(trees, True)),
    "block": ByFormula(lambda trees, topology: leaf_first(trees, takes_all(topology))),
    "largest first": ByFormula(lambda trees, topology: leaf_first(trees, True), largest_first),
    "likelier first": ByFormula(
        lambda trees, topology: leaf_first(trees, takes_all(topology)), likelier_first
    ),
}
"""The rules that are computed for each draft; the last two are no rules of specjax or a paper."""
_REGISTERED = (sampling.Rejection(), sampling.Block())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/bound_acceptance.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    nodes: Annotated[int, Whole(1, 6)] = 5
    """The number of nodes of the largest trees."""
    vocab: Annotated[int, Whole(2, 4)] = 3
    """The number of tokens (V)."""
    pairs: Annotated[int, Whole(1)] = 20
    """The number of pairs of p and q of each kind."""
    seed: Annotated[int, Whole(0)] = 0
    """The seed of p and q."""
    replace: Annotated[bool, Flag()] = False
    """Draw siblings independently instead of without replacement."""
    enumerated: Annotated[bool, Flag()] = True
    """Enumerate `rejection` and `block` beside their formulas."""
    smoke: Annotated[bool, Flag()] = False
    """Run a small version: three nodes and one pair of each kind."""


class Row(NamedTuple):
    """What each column of the table accepts of one tree, by pair of p and q."""

    topology: Topology
    accepted: dict[str, Float[np.ndarray, " pairs"]]

    @property
    def nested(self) -> bool:
        """Whether no sibling has a larger subtree than one that was drawn before it."""
        return bool(takes_all(self.topology).all())


def run(flags: Flags) -> int:
    """Print the tables; return the exit code."""
    nodes, count = (3, 1) if flags.smoke else (flags.nodes, flags.pairs)
    rows, errors = [], []
    columns = [*RULES, *([] if flags.replace else ["coupled"]), "optimum", "transport"]
    print(f"| parents | {' | '.join(columns)} | block / optimum | least |")
    print("|---" * (len(columns) + 3) + "|")
    for topology in ordered_trees(nodes, flags.vocab):
        pairs = [
            pair
            for kind in KINDS
            for pair in random_pairs(kind, count, flags.vocab, topology.depth, flags.seed)
        ]
        row, error = compared(topology, pairs, replace=flags.replace)
        rows.append(row)
        errors.append(error)
        if flags.enumerated:
            some = pairs[::count]
            errors.append(registered_error(topology, some, replace=flags.replace))
        print(_line(row), flush=True)
    print()
    for text in _summary(rows, count):
        print(f"- {text}")
    print(
        f"- the largest error of an output's probability or of a registered rule: {max(errors):.1e}"
    )
    if not flags.replace:
        print("\n| parents | block | optimum, p on the tree | optimum, all of p | most |")
        print("|---|---|---|---|---|")
        for topology in ordered_trees(min(nodes, 4), flags.vocab):
            if topology.depth > 1 and not topology.is_chain:
                print(_line_of_hidden(topology, flags.vocab, count, flags.seed), flush=True)
    return int(max(errors) > TOLERANCE)


def compared(
    topology: Topology, pairs: Sequence[DistributionPair], *, replace: bool = False
) -> tuple[Row, float]:
    """Return what each rule and each bound accepts, and the largest error of the rules' outputs."""
    drafts = drawn_trees(topology, pairs, replace=replace)
    trees, accepted, error = trees_of(drafts), {}, 0.0
    for name, rule in RULES.items():
        tested = rule.order(trees)
        ends = rule.ends(tested, topology)
        renamed = drafts._replace(tokens=tested.tokens, valid=tested.valid)
        error = max(error, _output_error(renamed, ends.outcomes(), pairs))
        accepted[name] = np.bincount(drafts.group, drafts.weight * ends.lengths(topology))
    if not replace:
        accepted["coupled"] = np.array([coupled_length(topology, pair) for pair in pairs])
    drafted = [drafted_paths(drafts, group) for group in range(len(pairs))]
    for name, bound in (("optimum", optimum), ("transport", transport)):
        values = [bound(paths, pair.p) for paths, pair in zip(drafted, pairs, strict=True)]
        accepted[name] = np.array(values)
    return Row(topology, accepted), error


def registered_error(
    topology: Topology, pairs: Sequence[DistributionPair], *, replace: bool = False
) -> float:
    """Return the largest error of `rejection` and `block`, by enumeration of their uniforms.

    An error is that of an output's probability, or a difference from the formulas of this script.
    """
    drafts = drawn_trees(topology, pairs, replace=replace)
    error, trees = 0.0, trees_of(drafts)
    for rule in _REGISTERED:
        outcomes = decisions(decision_function(rule, topology), drafts)
        lengths = np.zeros(len(drafts.tokens))
        np.add.at(lengths, outcomes.item, outcomes.volume * topology.depths[outcomes.slot])
        expected = RULES[rule.name].ends(trees, topology).lengths(topology)
        error = max(error, _output_error(drafts, outcomes, pairs))
        error = max(error, float(np.abs(lengths - expected).max()))
    return error


def _output_error(drafts: Drafts, outcomes: Outcomes, pairs: Sequence[DistributionPair]) -> float:
    tables = [pair.p for pair in pairs]
    got, want = output_distributions(drafts, outcomes, tables), target_distributions(tables)
    return float(np.abs(got - want).max())


def optima_if_hidden(
    topology: Topology, pair: DistributionPair, other: Table
) -> tuple[float, float, float]:
    """Return the mean over targets of what `block`, a rule that sees less, and any rule accept.

    The targets have, after each first token, the distribution of `pair` or that of `other`: all
    2**V combinations. The second rule verifies a draft alike if these distributions are the same
    after all drafted first tokens, since it cannot see the others; the third one sees all of p.
    """
    vocab = other[1].shape[-1]
    options = list(itertools.product((False, True), repeat=vocab))
    worlds = [
        (pair.p[0], np.where(np.array(option)[:, None], other[1], pair.p[1]), *pair.p[2:])
        for option in options
    ]

    def seen(tree: Paths, world: int) -> tuple[tuple[int, bool], ...]:
        firsts = sorted(path[0] for path in tree if len(path) == 1)
        return tuple((first, options[world][first]) for first in firsts)

    drafted = drafted_paths(drawn_trees(topology, [pair]))
    targets = [DistributionPair("", world, pair.q) for world in worlds]
    drafts = drawn_trees(topology, targets)
    lengths = RULES["block"].ends(trees_of(drafts), topology).lengths(topology)
    block = float((drafts.weight * lengths).sum()) / len(worlds)
    any_rule = np.mean([optimum(drafted, world) for world in worlds])
    return block, mean_optimum(drafted, worlds, seen), float(any_rule)


def ordered_trees(most_nodes: int, most_children: int) -> list[Topology]:
    """Return every ordered tree of 1 to `most_nodes` nodes, the root not counted.

    Nodes are numbered level by level; no slot has more than `most_children` children.
    """
    return [
        Topology(parents)
        for count in range(1, most_nodes + 1)
        for parents in itertools.product(*(range(node + 1) for node in range(count)))
        if sorted(parents) == list(parents) and max(map(parents.count, parents)) <= most_children
    ]


def random_pairs(
    kind: str, count: int, vocab: int, depth: int, seed: int
) -> list[DistributionPair]:
    """Return random p and q, new ones in every context, for drafts of up to `depth` tokens.

    `kind` is one of `KINDS`.
    """
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    spread, kept, shared = KINDS[kind]

    def table(depths: int) -> Table:
        found = []
        for length in range(depths):
            weights = rng.dirichlet(np.full(vocab, spread), vocab**length)
            mask = (rng.uniform(size=weights.shape) < kept) & (weights > _LEAST)
            mask[np.arange(len(mask)), weights.argmax(axis=1)] |= ~mask.any(axis=1)
            found.append(normalized(weights * mask, 0.0))
        return tuple(found)

    pairs = []
    for number in range(count):
        p, q = table(depth + 1), table(depth)
        q = tuple(shared * a + (1 - shared) * b for a, b in zip(p, q, strict=False))
        pairs.append(DistributionPair(f"{kind} {number}", p, q))
    return pairs


def _line(row: Row) -> str:
    means = " | ".join(f"{values.mean():.3f}" for values in row.accepted.values())
    parents = " ".join(map(str, row.topology.parents))
    return f"| {parents}{'' if row.nested else ' *'} | {means} | {_shares(row.accepted, 'block')} |"


def _shares(accepted: dict[str, Float[np.ndarray, " pairs"]], name: str) -> str:
    """Return the share of the optimum that is accepted in the mean, and in the worst pair."""
    possible = accepted["optimum"] > TOLERANCE
    got, best = accepted[name][possible], accepted["optimum"][possible]
    return f"{got.mean() / best.mean():.1%} | {(got / best).min():.1%}"


def _summary(rows: Sequence[Row], count: int) -> Iterator[str]:
    """Yield lines on groups of trees, and on the kinds of p and q."""
    branching = [row for row in rows if not row.topology.is_chain]
    groups = {
        "chains": [row for row in rows if row.topology.is_chain],
        "trees whose later siblings have no larger subtrees": [r for r in branching if r.nested],
        "other trees (*)": [row for row in branching if not row.nested],
    }
    for name, group in groups.items():
        if group:
            yield f"{name} ({len(group)}), mean share of the optimum: {_mean_shares(group)}"
    for number, kind in enumerate(KINDS):
        pairs = slice(number * count, (number + 1) * count)
        yield f"{kind}: {_mean_shares(rows, pairs)}"
    for name in ("HSD", "traversal", "largest first", "likelier first"):
        gains = np.concatenate([r.accepted[name] - r.accepted["block"] for r in rows])
        means = {r.topology.parents: (r.accepted[name] - r.accepted["block"]).mean() for r in rows}
        best = max(means, key=means.__getitem__)
        yield (
            f"{name} less block: {gains.min():.3f} to {gains.max():.3f}, in the mean over pairs at "
            f"most {max(0.0, means[best]):.4f} ({' '.join(map(str, best))})"
        )
    over = min((r.accepted["optimum"] - r.accepted[n]).min() for r in rows for n in _rules(r))
    yield f"least optimum less a rule: {over:.1e}"


def _rules(row: Row) -> list[str]:
    return [name for name in row.accepted if name not in ("optimum", "transport")]


def _mean_shares(rows: Sequence[Row], pairs: slice = slice(None)) -> str:
    def total(name: str) -> float:
        return sum(float(row.accepted[name][pairs].mean()) for row in rows)

    best = total("optimum")
    return ", ".join(f"{name} {total(name) / best:.1%}" for name in _rules(rows[0]))


def _line_of_hidden(topology: Topology, vocab: int, count: int, seed: int) -> str:
    found = []
    for kind in KINDS:
        both = (random_pairs(kind, count, vocab, topology.depth, seed + n) for n in (1, 2))
        for pair, other in zip(*both, strict=True):
            found.append(optima_if_hidden(topology, pair, other.p))
    means, differences = np.mean(found, axis=0), [best - seen for _, seen, best in found]
    values = " | ".join(f"{mean:.4f}" for mean in means)
    return f"| {' '.join(map(str, topology.parents))} | {values} | {max(differences):.4f} |"


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
