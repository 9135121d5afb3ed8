"""Every method in every topology on targets with recurrent layers, under every rule."""

from conformance.cells import cells
from conformance.checks import Conformance
from conformance.methods import RECURRENT, TOPOLOGIES


class TestRecurrentTargets(Conformance):
    cells = tuple(cell for topology in TOPOLOGIES for cell in cells(topology, RECURRENT))
