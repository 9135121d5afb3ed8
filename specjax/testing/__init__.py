"""Tests of exactness for rules and drafters of your own, by the machinery of specjax's own tests.

    check_rule(rule)                   enumerates every outcome in float64: exact to 1e-10, or a
                                       counterexample
    check_drafter(drafter, target)     a chi-square test of what the real loop emits, over many rows

    print(check_rule("rejection"))
    print(check_drafter(my_drafter, (Tabular(8), logits)))   # logits [V], or [V, V] by last token

Both return a value with `passed` and a text that says what was found (`Check`, `DrafterCheck`).
A `Tabular` is a language model that is a table of logits, so that tests take seconds; a
`DistributionPair` is one pair of p and q for `check_rule`. More: docs/extending.md.
"""

from specjax.testing.drafter_check import DrafterCheck, check_drafter
from specjax.testing.rule_check import Check, DistributionPair, check_rule
from specjax.testing.tabular import Tabular

__all__ = ["Check", "DistributionPair", "DrafterCheck", "Tabular", "check_drafter", "check_rule"]
