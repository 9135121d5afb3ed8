"""What rules accept of small trees, beside the best exact rule (`scripts/bound_acceptance.py`)."""

import itertools

import numpy as np
import pytest
from commands import script_module
from conftest import slow

from specjax.testing import DistributionPair
from specjax.testing.enumeration import output_distributions, target_distributions
from specjax.trees import Topology

with script_module("bound_acceptance") as script:
    from lib import best_acceptance, tree_rules

VOCAB = 3
TREES = script.ordered_trees(4, VOCAB)
FORK, LATER, PAIRS = (0, 0, 1), (0, 0, 2), (0, 0, 1, 1)
"""Two siblings, the first or the second of which has a child, and the first of which has two."""


def all_pairs(topology, count=1):
    return [
        pair
        for kind in script.KINDS
        for pair in script.random_pairs(kind, count, VOCAB, topology.depth, 0)
    ]


def error_of(topology, rule, order=lambda trees: trees):
    """The largest error of an output's probability, if siblings are tested in some order."""
    pairs = all_pairs(topology, 2)
    drafts = tree_rules.drawn_trees(topology, pairs)
    trees = order(tree_rules.trees_of(drafts))
    drafts = drafts._replace(tokens=trees.tokens, valid=trees.valid)
    tables = [pair.p for pair in pairs]
    got = output_distributions(drafts, rule(trees).outcomes(), tables)
    return np.abs(got - target_distributions(tables)).max()


@pytest.mark.parametrize("replace", [False, True])
def test_no_exact_rule_accepts_more_than_the_optimum(replace):
    """Which `block` and HSD reach on chains; on trees HSD accepts no more than `block`."""
    assert len(TREES) == 21
    for topology in TREES:
        row, error = script.compared(topology, all_pairs(topology), replace=replace)
        assert error < 1e-12
        accepted = row.accepted
        assert (accepted["transport"] > accepted["optimum"] - 1e-9).all()
        for rule in script.RULES:
            assert (accepted[rule] < accepted["optimum"] + 1e-9).all()
        assert accepted["HSD"].mean() < accepted["block"].mean() + 1e-12
        if topology.is_chain:
            for name in ("HSD", "traversal", "optimum"):
                np.testing.assert_allclose(accepted[name], accepted["block"], atol=1e-9)
        if row.nested:
            for name in ("traversal", "largest first"):
                np.testing.assert_allclose(accepted[name], accepted["block"], atol=1e-12)


def test_bounds_of_two_tokens_by_hand():
    """Sun et al. 2403.10444, section 2: 10/9, 11/9, and 12/9 with full information."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    pair = DistributionPair.constant("two", p, q, 2)
    row, _ = script.compared(Topology((0, 1)), [pair])
    found = [row.accepted[name][0] for name in ("rejection", "block", "optimum", "transport")]
    np.testing.assert_allclose(found, [10 / 9, 11 / 9, 11 / 9, 12 / 9], atol=1e-9)


@pytest.mark.parametrize("parents", [(0,), (0, 0), (0, 0, 0)])
@pytest.mark.parametrize("replace", [False, True])
def test_the_optimum_of_siblings_is_the_smallest_cut(parents, replace):
    """Of drafts and tokens: the least, over sets H, of p(H) + P(not all siblings are in H)."""
    topology = Topology(parents)
    for pair in all_pairs(topology, 3):
        drafted = best_acceptance.drafted_paths(
            tree_rules.drawn_trees(topology, [pair], replace=replace)
        )
        cuts = []
        for inside in itertools.product((False, True), repeat=VOCAB):
            allowed = {(), *((token,) for token in np.flatnonzero(inside).tolist())}
            outside = sum(chance for tree, chance in drafted.items() if not tree <= allowed)
            cuts.append(pair.p[0][0] @ np.array(inside) + outside)
        assert best_acceptance.optimum(drafted, pair.p) == pytest.approx(min(cuts), abs=1e-9)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_transport_of_a_chain_is_the_overlap_of_its_prefixes(length):
    topology = Topology(tuple(range(length)))
    for pair in all_pairs(topology):
        p = q = np.ones(1)
        overlap = 0.0
        for depth in range(length):
            p, q = ((one[:, None] * t[depth]).ravel() for one, t in ((p, pair.p), (q, pair.q)))
            overlap += np.minimum(p, q).sum()
        drafted = best_acceptance.drafted_paths(tree_rules.drawn_trees(topology, [pair]))
        assert best_acceptance.transport(drafted, pair.p) == pytest.approx(overlap, abs=1e-9)


@pytest.mark.parametrize(
    ("parents", "replace"),
    [
        (FORK, False),
        *slow(*((tree.parents, replace) for tree in TREES for replace in (False, True))),
    ],
)
def test_rejection_and_block_are_their_formulas(parents, replace):
    topology = Topology(parents)
    assert script.registered_error(topology, all_pairs(topology), replace=replace) < 1e-12


def test_hsd_needs_its_cap():
    """A ratio below 1 that follows one above 1 is of another continuation than what was emitted."""
    topology = Topology((0, 1, 2))
    assert error_of(topology, tree_rules.hierarchical) < 1e-12
    assert error_of(topology, lambda t: tree_rules.hierarchical(t, capped=False)) > 1e-3


@pytest.mark.parametrize(
    ("order", "parents"),
    [(tree_rules.largest_first, LATER), (tree_rules.likelier_first, (0, 1, 1))],
)
def test_siblings_in_another_order_need_the_distribution_of_that_order(order, parents):
    topology = Topology(parents)

    def as_drawn(trees):
        return order(trees)._replace(q=trees.q)

    def rule(trees):
        return tree_rules.leaf_first(trees, True)

    assert error_of(topology, rule, order) < 1e-12
    assert error_of(topology, rule, as_drawn) > 1e-3


@pytest.mark.parametrize("parents", [FORK, *slow((LATER,), (PAIRS,))])
def test_what_is_not_drafted_is_worth_little(parents):
    topology, losses = Topology(parents), []
    pairs = all_pairs(topology)
    for pair, other in itertools.pairwise(pairs):
        block, seen, best = script.optima_if_hidden(topology, pair, other.p)
        assert block - 1e-9 < seen < best + 1e-9
        losses.append(best - seen)
    assert max(losses) < 0.01


def test_coupled_draws_are_those_of_a_simulation():
    topology, rows = Topology(PAIRS), 200_000
    pair = all_pairs(topology)[0]
    noise = np.random.default_rng(0).gumbel(size=(2, rows, VOCAB))
    accepted = np.zeros(rows)
    drawn = np.argmax(np.log(pair.p[0][0]) + noise[0], axis=1)
    first, second = np.argsort(-(np.log(pair.q[0][0]) + noise[0]), axis=1).T[:2]
    accepted += (drawn == first) | (drawn == second)
    with np.errstate(divide="ignore"):
        p, q = (np.log(table[1][first]) for table in (pair.p, pair.q))
    below = np.argsort(-(q + noise[1]), axis=1)[:, :2] == np.argmax(p + noise[1], axis=1)[:, None]
    accepted += (drawn == first) & below.any(axis=1)
    spread = accepted.std() / np.sqrt(rows)
    assert abs(accepted.mean() - tree_rules.coupled_length(topology, pair)) < 5 * spread


def test_one_coupled_token_is_accepted_as_published():
    """Daliri et al. 2408.07978: the sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    rng = np.random.default_rng(0)
    for p, q in rng.dirichlet(np.ones(5), (20, 2)):
        want = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(5))
        assert tree_rules.chosen_by_rank(p, q, 1).sum() == pytest.approx(want)
        assert tree_rules.chosen_by_rank(p, q, 5).sum(axis=0) == pytest.approx(p)


@pytest.mark.parametrize("flags", [["--nodes=2", "--pairs=1"], *slow(["--smoke", "--replace"])])
def test_the_script_prints_tables(flags, capsys):
    with script_module("bound_acceptance") as program:
        assert program.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| parents | rejection | HSD | traversal | block |")
    assert sum(line.startswith("| 0") for line in lines) >= 3
