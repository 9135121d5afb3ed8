"""The static plan that a loop is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Array, Bool, Int

from specjax import sampling
from specjax.draft_length.limits import DraftLength
from specjax.drafters.turns import SleepingTurns, Turns
from specjax.models.interface import LanguageModel


@dataclass(frozen=True)
class Plan:
    """What is fixed when a loop is compiled.

    `widths` are the window sizes a round can run at, ascending, the last one N + 1. `chunks` are
    the sizes of the forwards that read prompts, descending (`prefill`).
    `rounds_per_step` (R) bounds the rounds of one call. `overlaps` also records what share of p
    each verified node's distribution has, which costs one warp per node. `plain_program` says that
    rounds in which all drafters sleep have a program of their own. A round in which at most
    `partial_rows` rows are unfinished has a partial pass, over so many rows with these among them
    (None: passes are over all rows).
    """

    target: LanguageModel
    drafter: Turns
    rule: sampling.Rule
    draft_length: DraftLength
    widths: tuple[int, ...]
    flags: sampling.WarpFlags
    capacity: int
    chunks: tuple[int, ...]
    rounds_per_step: int = 64
    logprobs: bool = False
    overlaps: bool = False
    plain_program: bool = False
    partial_rows: int | None = None

    @property
    def without_drafts(self) -> Plan:
        """Plain decoding in the same rows; what its program has more is what drafters will read."""
        drafter = SleepingTurns(self.drafter.parts)
        return replace(self, drafter=drafter, draft_length=DraftLength(0), widths=(1,))

    def is_partial(self, unfinished: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether a round with so many unfinished rows has a partial pass."""
        return unfinished <= (-1 if self.partial_rows is None else self.partial_rows)
