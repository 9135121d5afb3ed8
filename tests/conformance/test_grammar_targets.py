"""Every method in every topology where outputs follow a grammar, under every rule."""

from conformance.cells import cells
from conformance.checks import Conformance
from conformance.methods import TOPOLOGIES


class TestGrammarTargets(Conformance):
    cells = tuple(cell for topology in TOPOLOGIES for cell in cells(topology, ["grammar"]))
