"""Drafters of EAGLE-1 to 3 heads (Li et al. 2401.15077, 2503.01840); see `pair_drafter`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from specjax.methods.eagle.head import Eagle
from specjax.methods.heads.examined import NORM, Variation
from specjax.methods.heads.pair_drafter import PairDrafter


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(PairDrafter):
    """A drafter with an EAGLE or EAGLE-3 head: one layer over the target's features."""

    head: Eagle = field(kw_only=False)
    head_class = Eagle

    @property
    def name(self) -> str:
        """The name by which the drafter is made: "eagle" or "eagle3"."""
        return self.head.config.kind

    @property
    def fuses_taps(self) -> bool:
        """Whether `fc` reads the target's features, joined: in version 3."""
        return self.head.config.version == 3

    @property
    def addable_norms(self) -> tuple[tuple[str, bool], ...]:
        """The flags of norms before `fc`, and whether each is one norm over all taps."""
        config = self.head.config
        if config.version != 3 or config.norm_before_fc or config.fc_norm:
            return ()
        return (("norm_before_fc", True), ("fc_norm", False))

    def variations(self) -> Iterator[Variation]:
        """Yield drafters with another norm of version 3."""
        config = self.head.config
        if config.version != 3:
            return
        yield self.with_setting(NORM, "norm_before_residual", not config.norm_before_residual)
        if self.num_speculative_tokens > 1:
            yield self.with_setting(NORM, "norm_output", not config.norm_output)
        for flag in ("norm_before_fc", "fc_norm"):
            if getattr(config, flag):
                yield self.with_setting(NORM, flag, False)
