"""The machinery of the tests as functions, for rules and drafters of your own."""

from specjax.testing.drafters import DrafterCheck, check_drafter
from specjax.testing.rules import Check, DistributionPair, check_rule
from specjax.testing.tabular import Tabular

__all__ = ["Check", "DistributionPair", "DrafterCheck", "Tabular", "check_drafter", "check_rule"]
