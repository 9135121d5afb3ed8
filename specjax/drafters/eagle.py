"""EAGLE-1 to 3 heads as drafters (Li et al. 2401.15077 and 2503.01840); see `pair_drafter`."""

from __future__ import annotations

from dataclasses import dataclass, field

from specjax.drafters.pair_drafter import PairDrafter
from specjax.models.heads.eagle import Eagle


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(PairDrafter):
    """An EAGLE head as a drafter."""

    head: Eagle = field(kw_only=False)
    head_class = Eagle

    @property
    def name(self) -> str:
        """Its registered name."""
        return "eagle3" if self.head.config.version == 3 else "eagle"
