"""Every method's chains, under every rule."""

from conformance.cells import cells
from conformance.checks import Conformance


class TestChains(Conformance):
    cells = cells("chain")
