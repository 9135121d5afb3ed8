"""The cells that a method does not take are refused, and every method has its cells."""

import pytest
from conformance.methods import MAKERS, METHODS, REFUSED, TOPOLOGIES, TREES, takes, target

import specjax
from specjax.errors import InputError

CELLS = [
    (name, topology)
    for name in METHODS
    for topology in TOPOLOGIES
    if not takes(name, topology) and name != "none"
]


def test_every_method_is_in_the_matrix():
    assert {*MAKERS, "none"} == set(METHODS)
    assert set(REFUSED) <= set(CELLS)


@pytest.mark.parametrize(("name", "topology"), CELLS)
def test_others_are_refused(name, topology):
    if (name, topology) in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name, topology]):
            MAKERS[name](tree=TREES[topology])
        return
    says, options = "tree", {"tree": TREES.get(topology)}
    if topology not in TREES:
        says, options = METHODS[name].alone, {"continuations": [[1]]}
        name = f"ngram|{name}" if topology == "merged" else f"ngram+{name}"
    with pytest.raises(InputError, match=says):
        specjax.make_drafter(name, target(), **options)
