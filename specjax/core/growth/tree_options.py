"""The options of a token tree, for command lines and Python, and the shape they describe."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from specjax.errors import InputError, shown
from specjax.fields import Items, Whole, check_instance, check_values, fields_of, optional
from specjax.trees import DynamicTree, RankedTree, Rates, best_tree, tree_of_choices

TreeKind = Literal["chain", "static", "dynamic", "auto"]
_CHOICES = Items(
    Items(Whole(0, 1023), least=1),
    least=1,
    remedy="use paths of ranks, as ((0,), (1,), (0, 0))",
)
USUAL_DEPTH, USUAL_TOPK, USUAL_NODES = 5, 8, 32
"""The default depth, children of a node, and nodes of a tree."""
MOST_TOPK = 64
"""The largest number of children of a node."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """The kind and size of the tree that a drafter drafts.

    - `chain` means no tree.
    - `static` has the paths `choices`, each a sequence of ranks, such as Medusa's; or the tree with
      the most expected accepted tokens of `num_nodes` nodes, `depth` levels and at most `topk`
      children per node.
    - `dynamic` is a `DynamicTree` of these sizes, chosen anew in each round.
    - `auto` is the static tree within these sizes that is fastest on this machine, which
      `specjax.tuning` and the decode command determine.

    `acceptance[d][r]` is the measured rate at which the candidate of rank r at depth d (from 0) is
    accepted if its parent is; the heads that come with specjax have such rates. Raises InputError
    for numbers out of range and for incompatible options.
    """

    kind: TreeKind = "chain"
    """Whether to draft a chain or a tree, and of which kind."""
    topk: Annotated[int | None, optional(Whole(1, MOST_TOPK))] = None
    """The most children of a node, by default 8."""
    depth: Annotated[int | None, optional(Whole(1, 64))] = None
    """The number of levels, by default 5 or as many as the drafter can draft."""
    num_nodes: Annotated[int | None, optional(Whole(1, 1023))] = None
    """The number of nodes, by default 32 or as many as the other sizes allow."""
    choices: Annotated[tuple[tuple[int, ...], ...] | None, optional(_CHOICES)] = None
    """The paths of a static tree, each as the ranks of its nodes among their siblings."""
    acceptance: Rates | None = None
    """The rates by which the nodes of a static tree are chosen; by default measured or usual ones.
    """

    def __post_init__(self) -> None:
        check_instance(self, "tree.")
        if self.acceptance is not None:
            # An array has no hash.
            rates = tuple(tuple(map(float, level)) for level in self.acceptance)
            if not rates:
                raise InputError("tree.acceptance is empty: give the rates of each level, or none")
            object.__setattr__(self, "acceptance", rates)
        set_options = {
            field.name: value
            for field in fields(self)
            if field.name not in ("kind", "acceptance")
            and (value := getattr(self, field.name)) is not None
        }
        for name, value in set_options.items():
            if self.kind == "chain":
                remedy = "a chain has no such option; use tree.kind=static or dynamic"
            elif name == "choices" and self.kind != "static":
                remedy = f"tree.kind={self.kind} chooses the tree; use tree.kind=static"
            elif name != "choices" and "choices" in set_options:
                remedy = "tree.choices says it already; leave one of the two out"
            else:
                continue
            raise InputError(f"tree.{name}={shown(value)}: {remedy}")
        if self.choices is not None:
            self._chosen()

    def shape(
        self, length: int | None = None, longest: int | None = None
    ) -> RankedTree | DynamicTree | None:
        """Return the tree, or None for a chain.

        `length` is the requested path length, if any, and `longest` the drafter's longest path.
        Raises InputError for a tree of another depth, or with more nodes than its other sizes
        allow.
        """
        if self.kind == "chain":
            return None
        if self.kind == "auto":
            raise InputError(
                "tree.kind=auto: needs times of this machine; use "
                "specjax.tuning.with_fastest_trees(target, drafter, tree), or tree.kind=static"
            )
        tree = None if self.choices is None else self._chosen()
        depth = self.depth if tree is None else tree.depth
        if None not in (length, depth) and length != depth:
            field = "depth" if tree is None else "choices"
            raise InputError(
                f"num_speculative_tokens={length}: tree.{field} has {depth} levels; leave one of "
                "the two out"
            )
        if tree is not None:
            return tree
        depth = depth or length or min(USUAL_DEPTH, longest or USUAL_DEPTH)
        topk = self.topk or USUAL_TOPK
        if self.kind == "dynamic":
            most = DynamicTree(topk, depth, 0).num_candidates
            return DynamicTree(topk, depth, self._nodes(most, topk, depth))
        known = usual_rates(topk) if self.acceptance is None else self.acceptance
        # Deeper levels than were measured get the rates of the last measured one.
        rates = [known[min(level, len(known) - 1)][:topk] for level in range(depth)]
        most = sum(itertools.accumulate(map(len, rates), operator.mul))
        return best_tree(rates, self._nodes(most, topk, depth, min(map(len, rates))))

    def _chosen(self) -> RankedTree:
        try:
            return tree_of_choices(self.choices)
        except InputError as error:
            raise InputError(f"tree.{error}") from error

    def _nodes(self, most: int, topk: int, depth: int, ranked: int | None = None) -> int:
        """Return the number of nodes; raise InputError if more than `most` are requested.

        `ranked` is the number of candidates with known rates, if that is a limit.
        """
        if self.num_nodes is None:
            return min(USUAL_NODES, most)
        if self.num_nodes > most:
            numbers, remedy = f"topk={topk} and depth={depth}", "raise tree.topk or tree.depth"
            if ranked is not None and ranked < topk:
                numbers = f"rates of {ranked} candidates and depth={depth}"
                remedy = "raise tree.depth"
            raise InputError(
                f"tree.num_nodes={self.num_nodes}: with {numbers} there are at most {most}; lower "
                f"it, or {remedy}"
            )
        return self.num_nodes


def usual_rates(topk: int) -> tuple[tuple[float, ...], ...]:
    """Return the acceptance rate of each of `topk` ranks that is assumed if none was measured.

    The rates are 0.5, 0.25, ..., at any depth: each rank half as often as the one before.
    """
    return (tuple(0.5 ** (rank + 1) for rank in range(topk)),)


@dataclass(frozen=True)
class TreeKindOfValue:
    """The kind of arguments that are a tree: a shape, `TreeOptions` or a dict of them, or None."""

    def check(self, name: str, value: Any) -> TreeOptions | RankedTree | DynamicTree | None:
        """Return a shape unchanged, a mapping as `TreeOptions`, and a chain as None.

        Raises InputError for any other value.
        """
        if isinstance(value, TreeOptions) and value.kind == "chain":
            return None
        if value is None or isinstance(value, TreeOptions | RankedTree | DynamicTree):
            return value
        if not isinstance(value, Mapping):
            raise InputError(
                f"{name}={shown(value)}: use TreeOptions, or a dict of them as "
                '{"kind": "dynamic", "topk": 8}'
            )
        kinds = fields_of(TreeOptions)
        unset = {option: getattr(TreeOptions(), option) for option in kinds}
        checked = check_values({"tree": kinds}, {"tree": {**unset, **value}})
        return self.check(name, TreeOptions(**checked["tree"]))


TREE = TreeKindOfValue()


def over_marginals(value: Any) -> TreeOptions | RankedTree | DynamicTree | None:
    """Return a drafter's option `tree` for levels whose distributions are all known at once.

    The default `topk` of a dynamic tree is then `num_nodes`: that is the best tree of all (DDTree,
    2604.12989).
    """
    tree = TREE.check("drafter.tree", value)
    if isinstance(tree, TreeOptions) and (tree.kind, tree.topk) == ("dynamic", None):
        return replace(tree, topk=min(tree.num_nodes or USUAL_NODES, MOST_TOPK))
    return tree
