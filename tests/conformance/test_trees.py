"""Every method's trees under every rule: static, in which siblings have children, and dynamic."""

from cells import cells
from checks import Conformance


class TestTrees(Conformance):
    cells = (*cells("static"), *cells("dynamic"))
