"""Exactness tests for rules and drafters, as used by specjax's own test suite.

    check_rule(rule)                   enumerates every outcome in float64: exact to 1e-10, or a
                                       counterexample
    check_drafter(drafter, target)     a chi-square test of the real loop's output over many rows
    check_processor(processor)         enumerates plain and speculative decoding with a processor

    print(check_rule("rejection"))
    print(check_drafter(my_drafter, (Tabular(8), logits)))   # logits [V], or [V, V] by last token

All return a value with `passed` that prints as an explanation (`Check`, `DrafterCheck`). A
`Tabular` is a language model made of a table of logits, so that tests take seconds. A
`DistributionPair` is one pair of p and q for `check_rule`. More: docs/extending.md.

After this text `help` lists classes, then functions; `help(check_rule)` explains one of them.
"""

from specjax.testing.drafter_check import DrafterCheck, check_drafter
from specjax.testing.processor_check import check_processor
from specjax.testing.rule_check import Check, DistributionPair, check_rule
from specjax.testing.tabular import Tabular

__all__ = [
    "Check",
    "DistributionPair",
    "DrafterCheck",
    "Tabular",
    "check_drafter",
    "check_processor",
    "check_rule",
]
