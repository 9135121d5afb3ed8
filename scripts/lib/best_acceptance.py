"""The most tokens that any exact rule can accept of drafted trees, by linear programs.

A verifier gets a draft D, which has probability Q(D). It accepts a path of D, and emits one token
more unless the path ends at a leaf; let s be the emitted tokens. What follows s is drawn from
p(. | s), now or in later rounds. So a rule is a choice of x(D, s) >= 0 with sum_s x(D, s) = Q(D)
for every D. With E(s) = sum_D x(D, s), a sequence y is emitted with the probability

    sum of E(s) p(y) / p(s) over the prefixes s of y,

and the rule is exact if and only if that is p(y), that is, if E(s) / p(s) sums to 1 over the
prefixes of every y with p(y) > 0. The optimum is the largest sum of x(D, s) times the number of
accepted tokens. A draft counts as a set of paths, since neither acceptance nor exactness depends on
the order of siblings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.sparse

from specjax.testing.enumeration import Drafts, Table, contexts

Tokens = tuple[int, ...]
Paths = frozenset[Tokens]
"""A drafted tree, by the tokens on the path to each of its nodes; the root's () is one of them."""

_TOLERANCE = 1e-9


def drafted_paths(drafts: Drafts, group: int = 0) -> dict[Paths, float]:
    """Return the probability of each drafted tree of a group of drafts."""
    found: dict[Paths, float] = {}
    for item in np.flatnonzero(drafts.group == group):
        paths: list[Tokens] = [()]
        for node, parent in enumerate(drafts.topology.parents):
            paths.append((*paths[parent], int(drafts.tokens[item, node])))
        there = [path for path, valid in zip(paths[1:], drafts.valid[item], strict=True) if valid]
        tree = frozenset([(), *there])
        found[tree] = found.get(tree, 0.0) + float(drafts.weight[item])
    return found


def optimum(drafted: Mapping[Paths, float], p: Table) -> float:
    """Return the largest expected number of accepted tokens of an exact rule that knows all of p.

    `p` is the target's table, and `drafted` the probability of each draft.
    """
    return mean_optimum(drafted, [p], lambda tree, world: world)


def mean_optimum(
    drafted: Mapping[Paths, float],
    worlds: Sequence[Table],
    seen: Callable[[Paths, int], Hashable],
) -> float:
    """Return the largest mean, over several targets, of what one exact rule accepts.

    The rule verifies draft D of the target `worlds[i]` alike for all i with the same `seen(D, i)`,
    and is exact for each of these targets.
    """
    program, vocab = _Program(), worlds[0][0].shape[-1]
    share = 1 / len(worlds)
    emits: list[dict[Tokens, dict[int, float]]] = [{} for _ in worlds]
    views: dict[Hashable, dict[Tokens, int]] = {}
    for world in range(len(worlds)):
        for tree, weight in drafted.items():
            view = tree, seen(tree, world)
            if view not in views:
                ends = emitted(tree, vocab)
                views[view] = {tokens: program.variable() for tokens in ends}
                program.equal(dict.fromkeys(views[view].values(), 1.0), 1.0)
            for tokens, variable in views[view].items():
                program.gain[variable] += share * weight * _accepted(tree, tokens)
                emits[world].setdefault(tokens, {})[variable] = weight
    for table, emit in zip(worlds, emits, strict=True):
        chances = {tokens: _probability(table, tokens) for tokens in emit}
        # e(s) = E(s) / p(s); where p(s) is 0, nothing may be emitted.
        scaled = {tokens: program.variable() for tokens, chance in chances.items() if chance > 0}
        for tokens, terms in emit.items():
            if tokens in scaled:
                terms = terms | {scaled[tokens]: -chances[tokens]}
            program.equal(terms, 0.0)
        longest = max(map(len, emit))
        sums = {
            frozenset(y[:end] for end in range(1, longest + 1) if y[:end] in scaled)
            for y in itertools.product(range(vocab), repeat=longest)
            if _probability(table, y) > 0
        }
        for prefixes in sums:
            program.equal({scaled[tokens]: 1.0 for tokens in prefixes}, 1.0)
    return program.solve()


def transport(drafted: Mapping[Paths, float], p: Table) -> float:
    """Return the optimum if a rule could also choose how the text continues after what it emits.

    This is optimal transport between drafts and sequences y of tokens, with the number of tokens of
    y that are in the tree as gain. y has the distribution p, but given the draft, the tokens after
    the emitted ones do not. A decoder cannot do that in one round, since it needs the target's
    distributions after tokens that were not drafted.
    """
    program, vocab = _Program(), p[0].shape[-1]
    ends: dict[Tokens, dict[int, float]] = {}
    for tree, weight in drafted.items():
        variables = {tokens: program.variable() for tokens in emitted(tree, vocab)}
        program.equal(dict.fromkeys(variables.values(), 1.0), 1.0)
        for tokens, variable in variables.items():
            program.gain[variable] = weight * _accepted(tree, tokens)
            ends.setdefault(tokens, {})[variable] = weight
    longest = max(map(len, ends))
    # What passes through s ended there or before, and continues freely, or ends later.
    continues = {
        tokens: {program.variable(): chance}
        for length in range(1, longest + 1)
        for tokens in itertools.product(range(vocab), repeat=length)
        if (chance := _probability(p, tokens)) > 0
    }
    continues[()] = {}
    for tokens in ends.keys() | continues.keys():
        before = continues.get(tokens, {}) | ends.get(tokens, {})
        if len(tokens) == longest or tokens not in continues:
            program.equal(before, _probability(p, tokens))
            continue
        for token in range(vocab):
            after = continues.get((*tokens, token), {})
            before |= {variable: -chance for variable, chance in after.items()}
        program.equal(before, 0.0)
    return program.solve()


def emitted(tree: Paths, vocab: int) -> list[Tokens]:
    """Return what can be emitted after a draft: paths to leaves, and others with one token more."""
    found = []
    for path in sorted(tree):
        after = [(*path, token) for token in range(vocab)]
        if not any(tokens in tree for tokens in after):
            found.append(path)
        else:
            found.extend(tokens for tokens in after if tokens not in tree)
    return found


def _accepted(tree: Paths, tokens: Tokens) -> int:
    return len(tokens) if tokens in tree else len(tokens) - 1


def _probability(p: Table, tokens: Tokens) -> float:
    """Return p of a sequence of tokens."""
    vocab, chance = p[0].shape[-1], 1.0
    for depth, token in enumerate(tokens):
        row = contexts(np.array([tokens], np.int32), vocab, depth)[0]
        chance *= float(p[depth][row, token])
    return chance


class _Program:
    """A linear program over non-negative variables: equations, and a gain to maximise."""

    def __init__(self) -> None:
        self.gain: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.right: list[float] = []

    def variable(self) -> int:
        """Return the number of a new variable."""
        self.gain.append(0.0)
        return len(self.gain) - 1

    def equal(self, terms: Mapping[int, float], right: float) -> None:
        """Require that the sum of terms, factors by variable, is `right`."""
        # Drafts' probabilities differ by orders of magnitude; the solver's tolerance does not.
        largest = max(map(abs, terms.values()), default=1.0)
        terms, right = {at: factor / largest for at, factor in terms.items()}, right / largest
        self.rows.extend([len(self.right)] * len(terms))
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.right.append(right)

    def solve(self) -> float:
        """Return the largest gain."""
        shape = len(self.right), len(self.gain)
        matrix = scipy.sparse.csr_array((self.values, (self.rows, self.columns)), shape)
        options = {
            "primal_feasibility_tolerance": _TOLERANCE,
            "dual_feasibility_tolerance": _TOLERANCE,
        }
        found = scipy.optimize.linprog(
            -np.array(self.gain), A_eq=matrix, b_eq=self.right, method="highs", options=options
        )
        if not found.success:
            raise RuntimeError(f"the linear program was not solved: {found.message}")
        return -float(found.fun)
