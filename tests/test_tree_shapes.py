"""Static trees: from choices and back, the best for given acceptance, and their pictures."""

import functools
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.errors import InputError
from specjax.trees import (
    RankedTree,
    Topology,
    best_tree,
    chain_topology,
    draw,
    expansion_tree,
    sequoia_tree,
    svg,
    tree_of_choices,
)

# The first head's third candidate has no node of its own below it.
CHOICES = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [2]]


def test_choices_become_a_tree_and_back():
    tree = tree_of_choices(CHOICES)
    assert tree.choices == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0))
    assert tree.topology == Topology((0, 0, 0, 1, 1, 4))
    assert tree.ranks == (0, 1, 2, 0, 1, 0)
    assert tree.most_candidates == 3
    assert tree.topology.depths.tolist() == [0, 1, 1, 1, 2, 2, 3]
    # All nodes up to some depth are the first ones.
    assert RankedTree(tree.choices[:3]).topology == tree.topology.first(3)
    assert hash(tree_of_choices(reversed(CHOICES))) == hash(tree)


def test_an_expansion_is_a_tree():
    tree = expansion_tree((1, 1, 3, 1))
    assert tree.topology == Topology((0, 1, 2, 2, 2, 3, 4, 5))
    assert tree.choices[2:] == ((0, 0, 0), (0, 0, 1), (0, 0, 2), *((0, 0, n, 0) for n in range(3)))
    assert expansion_tree((2, 2)).topology == Topology((0, 0, 1, 1, 2, 2))
    assert expansion_tree(()) == tree_of_choices(())
    with pytest.raises(InputError, match=r"expansion=\(1, 0\): a level has at least one node"):
        expansion_tree((1, 0))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0]], r"choices: \[0\] is there twice"),
        ([[0], [2]], r"\[2\] needs \[1\], which is missing"),
        ([[0], [1, 0], [1, 1, 0]], r"\[1, 0\] needs \[1\]"),
        ([[]], r"\[\] is no path"),
        ([[0], [-1]], r"\[-1\] is no path"),
    ],
)
def test_choices_that_are_no_tree(choices, message):
    with pytest.raises(InputError, match=message):
        tree_of_choices(choices)


def test_nodes_are_in_any_order_with_parents_and_lower_ranks_first():
    tree = RankedTree(((0,), (0, 0), (1,)))
    assert tree.topology == Topology((0, 1, 0))
    assert tree.limited(1).choices == ((0,), (1,))
    for choices in (((0, 0), (0,)), ((1,), (0,))):
        with pytest.raises(InputError, match="comes after it"):
            RankedTree(choices)


@functools.cache
def every_tree(widths, num_nodes):
    """All trees of that many nodes, by brute force; `widths`: the candidates at each depth."""
    trees = {frozenset()}
    for _ in range(num_nodes):
        trees = {tree | {path} for tree in trees for path in may_follow(tree, widths)}
    return tuple(map(tree_of_choices, trees))


def may_follow(tree, widths):
    """The nodes that a tree lacks, and whose parent and siblings of lower ranks it has."""
    for parent in {()} | tree:
        rank = sum(path[:-1] == parent for path in tree)
        if len(parent) < len(widths) and rank < widths[len(parent)]:
            yield (*parent, rank)


RATES = [[0.5, 0.3, 0.1], [0.6, 0.2], [0.7, 0.05]]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
def test_the_best_tree_is_the_best_of_all(num_nodes):
    found = best_tree(RATES, num_nodes)
    assert found.topology.num_nodes == num_nodes
    most = max(tree.expected_tokens(RATES) for tree in every_tree((3, 2, 2), num_nodes))
    assert found.expected_tokens(RATES) == pytest.approx(most)
    # Smaller ones are the first nodes of larger ones.
    assert found.choices == best_tree(RATES, num_nodes + 1).choices[:num_nodes]


def test_what_the_best_tree_is_worth():
    tree = best_tree([[0.5, 0.3], [0.5, 0.3]], 3)
    assert tree.choices == ((0,), (1,), (0, 0))
    assert tree.expected_tokens([[0.5, 0.3], [0.5, 0.3]]) == pytest.approx(1 + 0.5 + 0.3 + 0.25)
    assert best_tree(RATES, 100).topology.num_nodes == 3 + 3 * 2 + 3 * 2 * 2
    assert best_tree(RATES, 100, max_depth=1).choices == ((0,), (1,), (2,))
    # Of equal chances the shallower node.
    assert best_tree([[0.5, 0.25], [0.5]], 2).choices == ((0,), (1,))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0, 0.33), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_sequoias_tree_is_the_best_of_all_in_any_order_of_rates(rates, num_nodes, depth):
    levels = [rates] * depth
    found = sequoia_tree(rates, num_nodes, depth)
    assert found.topology.num_nodes <= num_nodes
    most = max(
        (
            tree.expected_tokens(levels)
            for count in range(1, num_nodes + 1)
            for tree in every_tree((len(rates),) * depth, count)
        ),
        default=1.0,
    )
    assert found.expected_tokens(levels) == pytest.approx(most)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: best_tree(RATES, 0), "num_nodes=0 must be at least 1"),
        (lambda: best_tree([[0.9, 0.3]], 2), r"acceptance\[0\].*together at most 1"),
        (lambda: best_tree([[0.9], [-0.1]], 2), r"acceptance\[1\].*rates from 0 to 1"),
        (lambda: best_tree([[float("nan")]], 2), "rates from 0 to 1"),
        (lambda: sequoia_tree([0.5], 2, 0), "max_depth=0 must be at least 1"),
        (
            lambda: tree_of_choices(CHOICES).expected_tokens(RATES[:1]),
            "no rate of rank 0 at depth 1",
        ),
        (lambda: draw(chain_topology(2), ["a"]), "labels: 1 for 2 nodes"),
    ],
)
def test_bad_numbers_are_named(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_a_picture():
    tree = tree_of_choices([[0], [1], [0, 0], [0, 1]])
    assert draw(tree, ["a", "b", "c", "d"], root="the") == "\n".join(
        ["the", "├─ a", "│  ├─ c", "│  └─ d", "└─ b"]
    )
    assert draw(tree).splitlines()[1:] == ["├─ 0", "│  ├─ 0", "│  └─ 1", "└─ 1"]
    assert draw(chain_topology(2)).splitlines() == ["root", "└─ 1", "   └─ 2"]


def test_the_ancestors_of_a_built_tree_are_its_paths():
    tree = best_tree(RATES, 9)
    slots = {path: slot for slot, path in enumerate(tree.choices, start=1)}
    for path, slot in slots.items():
        seen = {0, *(slots[path[: length + 1]] for length in range(len(path)))}
        assert set(np.flatnonzero(tree.topology.ancestors[slot]).tolist()) == seen


def test_a_picture_has_each_node_once_and_no_two_overlap():
    tree = tree_of_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    labels = [f"<{rank}>" for rank in tree.ranks]
    picture = ElementTree.fromstring(svg(tree, labels, colours=["#1a7f37"] * 6, title="six"))
    name = "{http://www.w3.org/2000/svg}"
    texts, boxes = picture.findall(f"{name}text"), picture.findall(f"{name}rect")
    assert [text.text for text in texts] == ["root", *labels]
    assert len(picture.findall(f"{name}path")) == 6
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == 7
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    for box in boxes:
        assert 0 <= float(box.get("x")) <= width - float(box.get("width"))
        assert 0 <= float(box.get("y")) <= height - 18
    # Columns are as far apart as their widest node needs.
    columns = sorted({float(box.get("x")) for box in boxes})
    assert len(columns) == 4
    with pytest.raises(InputError, match="labels: 1 for 6 nodes"):
        svg(tree, ["a"])
