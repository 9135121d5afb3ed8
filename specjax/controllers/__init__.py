"""Length controllers: how much each drafter may draft, chosen on the host between two steps."""

from specjax.controllers.auto import Auto
from specjax.controllers.base import Controller, DrafterSizes, Limits, StepRecord, StepSizes
from specjax.controllers.fixed import ByBatch, Fixed, Recorded

__all__ = [
    "Auto",
    "ByBatch",
    "Controller",
    "DrafterSizes",
    "Fixed",
    "Limits",
    "Recorded",
    "StepRecord",
    "StepSizes",
]
