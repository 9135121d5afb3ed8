"""The machinery of the tests as functions, for rules and drafters of your own."""

from specjax.testing.drafters import DrafterCheck, check_drafter
from specjax.testing.rules import Check, Laws, check_rule
from specjax.testing.tabular import Tabular

__all__ = ["Check", "DrafterCheck", "Laws", "Tabular", "check_drafter", "check_rule"]
