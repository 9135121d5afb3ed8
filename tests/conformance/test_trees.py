"""Every method's trees under every rule: static, in which siblings have children, and dynamic."""

from conformance.cells import cells
from conformance.checks import Conformance


class TestTrees(Conformance):
    cells = (*cells("static"), *cells("dynamic"))
