"""Every method's chains, under every rule."""

from cells import cells
from checks import Conformance


class TestChains(Conformance):
    cells = cells("chain")
