"""The machinery of the tests as functions, for rules and drafters of your own."""

from specjax.testing.rules import Check, Laws, check_rule

__all__ = ["Check", "Laws", "check_rule"]
