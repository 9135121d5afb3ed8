"""How a call decodes: the rule, draft lengths, batch size and longest length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from specjax import sampling
from specjax.controllers import Auto, ByBatch, Controller, Fixed
from specjax.drafters import DRAFT_TOKENS
from specjax.errors import InputError, shown
from specjax.fields import (
    Choice,
    Either,
    Instance,
    Items,
    Whole,
    check_instance,
    optional,
)

AUTO, FIXED = "auto", "fixed"
"""Draft lengths: as many tokens as make decoding faster, or as many as the drafter has."""
_OWN_RULE = (
    "subclass specjax.sampling.UniformRule as a frozen dataclass with a method decide(self, "
    "tokens, num_valid, target, draft, uniforms) -> Decision, and pass an instance"
)
"""How to write a rule of one's own, as errors say it."""
RULE_NAME = Choice(tuple(sampling.RULES))
EXACT_RULE_NAME = Choice(tuple(name for name, rule in sampling.RULES.items() if rule.exact))


@dataclass(frozen=True)
class RuleKind:
    """A verification rule, or the name of one."""

    def check(self, name: str, value: Any) -> sampling.Rule:
        """The rule."""
        if isinstance(value, sampling.Rule):
            return value
        if callable(value):
            raise InputError(f"{name}={shown(value)}: a rule is a value; {_OWN_RULE}")
        return sampling.RULES[RULE_NAME.check(name, value)]


RULE = RuleKind()
DRAFT_LENGTH = Either((Choice((AUTO, FIXED)), DRAFT_TOKENS), remedy=DRAFT_TOKENS.remedy)
BATCH_SIZE = Whole(1)
CONTROLLER = Instance(
    Controller, "use one of specjax.controllers, or a frozen dataclass with init, choose and update"
)
MAX_LENGTH = Whole(2, remedy="use at least 2, a prompt and a new token")


@dataclass(frozen=True)
class LadderStep:
    """(low, high, k): at most k draft tokens while low..high rows are unfinished."""

    def check(self, name: str, value: Any) -> tuple[int, int, int]:
        """The three numbers."""
        low, high, count = Items(Whole(), length=3).check(name, value)
        if not (1 <= low <= high and count <= DRAFT_TOKENS.most):
            raise InputError(
                f"{name}={shown(value)}: must be (low, high, k) with 1 <= low <= high and "
                f"0 <= k <= {DRAFT_TOKENS.most}"
            )
        return low, high, count


@dataclass(frozen=True)
class Ladder:
    """`num_speculative_tokens_per_batch_size`: steps for numbers of rows that do not overlap."""

    def check(self, name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
        """The steps."""
        remedy = "use steps of (low, high, k), such as ((1, 4, 8), (5, 16, 2))"
        Items(Instance(Sequence, remedy), remedy=remedy).check(name, value)
        steps = Items(LadderStep()).check(name, value)
        for (_, before, _), (low, *_) in itertools.pairwise(sorted(steps)):
            if low <= before:
                raise InputError(
                    f"{name}={shown(value)}: two steps hold for {low} rows; let them not overlap"
                )
        return steps


@dataclass(frozen=True)
class DecodeOptions:
    """How prompts are decoded, whatever they are; see `generate.generate` for each field.

    Raises InputError for values out of range.
    """

    num_speculative_tokens: Annotated[int | str, DRAFT_LENGTH] = FIXED
    num_speculative_tokens_per_batch_size: Annotated[Sequence[tuple[int, int, int]], Ladder()] = ()
    verify: Annotated[str | sampling.Rule, RULE] = "rejection"
    batch_size: Annotated[int | None, optional(BATCH_SIZE)] = None
    max_length: Annotated[int | None, optional(MAX_LENGTH)] = None
    controller: Annotated[Controller | None, optional(CONTROLLER)] = None

    def __post_init__(self) -> None:
        check_instance(self, "")
        by_batch = self.num_speculative_tokens_per_batch_size
        if by_batch and self.num_speculative_tokens == AUTO:
            raise InputError(
                "num_speculative_tokens='auto': num_speculative_tokens_per_batch_size says how "
                'much to draft; use "fixed" or a number beside it'
            )
        if self.controller is not None and (by_batch or self.num_speculative_tokens == AUTO):
            raise InputError(
                f"controller={shown(self.controller)}: it chooses the lengths; leave out "
                'num_speculative_tokens="auto" and num_speculative_tokens_per_batch_size'
            )

    def without_drafts(self) -> DecodeOptions:
        """The same for plain decoding."""
        return replace(
            self,
            num_speculative_tokens=FIXED,
            num_speculative_tokens_per_batch_size=(),
            controller=None,
        )

    @property
    def length_controller(self) -> Controller:
        """What chooses each step's draft lengths."""
        if self.controller is not None:
            return self.controller
        if self.num_speculative_tokens == AUTO:
            return Auto()
        if self.num_speculative_tokens_per_batch_size:
            return ByBatch(self.num_speculative_tokens_per_batch_size)
        return Fixed()

    @property
    def fixed_draft_length(self) -> int | None:
        """`num_speculative_tokens` where it is a number."""
        length = self.num_speculative_tokens
        return length if isinstance(length, int) else None
