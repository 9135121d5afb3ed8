"""Every method beside a lookup, in one tree or in turns, under every rule."""

from cells import cells
from checks import Conformance


class TestPairs(Conformance):
    cells = (*cells("merged"), *cells("turns"))
