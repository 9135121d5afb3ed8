"""What the draft length `auto` decided by: costs at the start of a run and at its end.

What it chose (drafts and widths by round) is in the counts of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specjax import metrics, theory
from specjax.errors import InputError


@dataclass(frozen=True)
class PartCosts:
    """Seconds of one drafter's work in a round, alone or one of several in turn.

    `first_s` are to observe what was committed and to draft a token, `further_s` to draft one more;
    a tree is drafted whole in `first_s`. `catch_up_s` are for a pass over what it missed while it
    did not draft. `num_nodes` are those of a tree, None for a chain.
    """

    drafter: str
    num_speculative_tokens: int
    first_s: float
    further_s: float
    num_nodes: int | None = None
    catch_up_s: float = 0.0


@dataclass(frozen=True)
class AutoCosts:
    """Seconds of a round without drafting, by width, and of each drafter."""

    width_s: Mapping[int, float]
    drafters: tuple[PartCosts, ...]

    def break_even(self, part: PartCosts) -> float | None:
        """The least acceptance of each draft token at which a draft is no slower than none.

        The least `theory.break_even_alpha` of the drafts that fill a width; None where none pays,
        and for trees, whose tokens have chances of their own each.
        """
        if part.num_nodes is not None:
            return None
        plain, found = self.width_s[1], []
        for width in self.width_s:
            length = min(width - 1, part.num_speculative_tokens)
            if not length:
                continue
            draft_s = part.first_s + (length - 1) * part.further_s
            cost = self.width_s[width] / plain
            with suppress(InputError):  # no acceptance makes up for it
                found.append(
                    theory.break_even_alpha(
                        length, draft_s / plain, convention="per_draft", verify_cost=cost
                    )
                )
        return min(found, default=None)

    def content(self) -> dict[str, Any]:
        """As JSON, with each drafter's break-even acceptance."""
        return {
            "width_s": {str(width): seconds for width, seconds in self.width_s.items()},
            "drafters": [
                {**vars(part), "break_even_acceptance": self.break_even(part)}
                for part in self.drafters
            ],
        }


@dataclass(frozen=True)
class AutoLengths:
    """Costs at a run's start and end, and the seconds of the rounds that measured them.

    None where a run ended before they were known.
    """

    measure_s: float = 0.0
    start: AutoCosts | None = None
    end: AutoCosts | None = None

    def content(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "measure_s": self.measure_s,
            "start": self.start and self.start.content(),
            "end": self.end and self.end.content(),
        }


def drafted_per_round(counts: metrics.Summary) -> float | None:
    """Mean draft length, empty drafts counted; None without rounds."""
    return counts.num_draft_tokens / counts.num_rounds if counts.num_rounds else None
