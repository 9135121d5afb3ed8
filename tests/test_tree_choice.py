"""Which tree decodes fastest, by costs and acceptance."""

import functools
import itertools
import math

import pytest

from specjax import theory
from specjax.errors import InputError
from specjax.trees import best_tree, chain_topology, fastest_tree, tree_of_choices

RATES = [[0.6, 0.15, 0.08, 0.04], [0.5, 0.15, 0.1, 0.02], [0.4, 0.2, 0.05, 0.03]]
LLAMA_8B = theory.ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = theory.ModelShape(80, 8192, 28672, 64, 8, 128, 128256)


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("draft", [0.0, 0.05, 0.4])
def test_the_fastest_tree_is_the_fastest_of_all(slope, draft):
    found = fastest_tree(
        RATES,
        lambda width: 1 + slope * (width - 1),
        lambda depth: draft * depth,
        widths=range(1, 14),
    )
    speeds = {0: 1.0}
    for nodes, depth in itertools.product(range(1, 13), range(1, 4)):
        tree = best_tree(RATES, nodes, depth)
        cost = 1 + slope * tree.topology.num_nodes + draft * tree.topology.depth
        speeds[nodes, depth] = tree.expected_tokens(RATES) / cost
    assert found.row_tokens_per_second == pytest.approx(max(speeds.values()))
    assert found.tokens_per_round == pytest.approx(found.tree.expected_tokens(RATES))
    assert (found.tree.topology.num_nodes == 0) == (max(speeds.values()) == 1.0)


def test_where_drafts_are_dear_a_chain_or_nothing_is_left():
    sure = [[0.9]] * 4
    chain = fastest_tree(
        sure, lambda width: 1 + 0.1 * width, lambda depth: 0.0, widths=(1, 2, 3, 5)
    )
    assert chain.tree.topology == chain_topology(4)
    nothing = fastest_tree(sure, lambda width: width, lambda depth: 0.5)
    assert nothing.tree == tree_of_choices(())
    assert (nothing.tokens_per_round, nothing.round_seconds) == (1.0, 1)


def test_on_paper_trees_shrink_as_batches_grow():
    sizes = []
    for batch in (1, 4, 16, 64, 256):
        found = theory.roofline_tree(
            LLAMA_8B, "h100-sxm", RATES, batch=batch, context=1000, draft_cost=0.03
        )
        sizes.append(found.tree.topology.num_nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 30
    assert sizes[-1] <= 4


@pytest.mark.parametrize("chip", ["h100-sxm", "h200", "tpu-v5e", "tpu-v5p"])
@pytest.mark.parametrize(
    ("shape", "draft_cost", "batch"),
    [(LLAMA_8B, 0.03, 1), (LLAMA_70B, LLAMA_8B, 16)],
)
def test_on_paper_the_tree_is_the_fastest_of_all(chip, shape, draft_cost, batch):
    """But for sizes between those that are tried."""
    where = {"batch": batch, "context": 1000}

    @functools.cache
    def seconds(width):
        return float(theory.pass_seconds(shape, chip, tokens=width, **where))

    level = 0.03 * seconds(1)
    if draft_cost is LLAMA_8B:
        level = float(theory.pass_seconds(LLAMA_8B, chip, tokens=8, **where))
    found = theory.roofline_tree(shape, chip, RATES, draft_cost=draft_cost, **where)
    speeds = []
    for depth in (1, 2, 3):
        # The first nodes are the best smaller tree.
        choices = best_tree(RATES, 84, depth).choices
        chances = [math.prod(RATES[d][rank] for d, rank in enumerate(path)) for path in choices]
        for nodes, tokens in enumerate(itertools.accumulate(chances, initial=1.0)):
            levels = max(map(len, choices[:nodes]), default=0)
            speeds.append(tokens / (seconds(1 + nodes) + levels * level))
    best = max(speeds)
    assert 0.99 * best <= found.row_tokens_per_second <= best * (1 + 1e-9)


def test_bad_input_names_the_remedy():
    with pytest.raises(InputError, match=r"widths=\(0,\)"):
        fastest_tree(RATES, float, float, widths=(0,))
    with pytest.raises(InputError, match=r"pass_seconds\(1\)=0 must be above 0"):
        fastest_tree(RATES, lambda width: 0.0, float)
    with pytest.raises(InputError, match=r"acceptance\[0\]"):
        fastest_tree([[2.0]], float, float)
    with pytest.raises(InputError, match="batch"):
        theory.roofline_tree(LLAMA_8B, "h100-sxm", RATES, batch=0, context=1)
