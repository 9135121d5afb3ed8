"""Every method beside a lookup, in one tree or in turns, under every rule."""

from conformance.cells import cells
from conformance.checks import Conformance


class TestPairs(Conformance):
    cells = (*cells("merged"), *cells("turns"))
