"""Drafters of EAGLE-1 to 3 heads (Li et al. 2401.15077, 2503.01840); see `pair_drafter`."""

from __future__ import annotations

from dataclasses import dataclass, field

from specjax.methods.eagle.head import Eagle
from specjax.methods.heads.pair_drafter import PairDrafter


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(PairDrafter):
    """A drafter with an EAGLE or EAGLE-3 head: one layer over the target's features."""

    head: Eagle = field(kw_only=False)
    head_class = Eagle

    @property
    def name(self) -> str:
        """The name by which the drafter is made: "eagle" or "eagle3"."""
        return "eagle3" if self.head.config.version == 3 else "eagle"
