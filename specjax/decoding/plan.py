"""The static plan that a loop is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    rounds in which all drafters sleep have a program of their own. `row_counts` are
    the numbers of rows, ascending, that a round's pass can be over where no more are unfinished,
    beside all of them.
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
    row_counts: tuple[int, ...] = ()

    @property
    def without_drafts(self) -> Plan:
        """Plain decoding in the same rows; what its program has more is what drafters will read."""
        return replace(
            self,
            drafter=SleepingTurns(self.drafter.parts),
            draft_length=DraftLength(0),
            widths=(1,),
            row_counts=fewer_rows(max(self.row_counts, default=0), num_widths=1),
        )


def fewer_rows(most: int, num_widths: int) -> tuple[int, ...]:
    """The `row_counts` of a plan, the largest of them `most` (0: none).

    Each is compiled once more for every width, so that only plans of a single width have two.
    """
    counts = {most} if num_widths > 1 else {most // 2, most}
    return tuple(sorted(counts - {0}))
