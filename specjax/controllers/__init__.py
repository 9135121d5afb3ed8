"""Length controllers: how much each drafter may draft, chosen on the host between steps.

    Fixed(5)                   the same length in every step
    ByBatch(((1, 4, 8), ...))  a length for each number of unfinished rows
    Auto()                     the length that is fastest on this machine
    Recorded(step_limits)      the lengths of an earlier run

    specjax.generate(model, prompts, drafter=drafter, controller=Auto())

A custom controller implements the three methods of `Controller`, and may implement that of
`LearnsCosts`. More: docs/draft_length.md.
"""

from specjax.controllers.auto import Auto
from specjax.controllers.base import (
    Controller,
    DrafterSizes,
    LearnsCosts,
    Limits,
    StepRecord,
    StepSizes,
)
from specjax.controllers.fixed import ByBatch, Fixed, Recorded

__all__ = [
    "Auto",
    "ByBatch",
    "Controller",
    "DrafterSizes",
    "Fixed",
    "LearnsCosts",
    "Limits",
    "Recorded",
    "StepRecord",
    "StepSizes",
]
