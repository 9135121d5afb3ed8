"""The base class of drafters with a cache of their own, of which drafts may attend to a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from specjax.core.growth.autoregressive import ChainDrafter
from specjax.errors import InputError
from specjax.fields import Whole, optional
from specjax.models.config import SlidingWindow

TOKENS = Whole(1, 1 << 20)
SINKS = Whole(0, 1 << 20)


@dataclass(frozen=True, kw_only=True)
class OwnCacheDrafter(ChainDrafter):
    """A drafter that runs layers with keys of its own.

    With a `sliding_window`, tokens attend in these layers to the latest so many tokens only,
    themselves included, and to the first `sinks` of the row (StreamingLLM: Xiao et al. 2309.17453).
    Keys keep their positions and their place in the cache. A row drafts up to the last of the
    layers' own positions or, with a window that is no longer than these, without end: rotary layers
    see distances only. Learned positions end in any case. Raises InputError for sinks without a
    window, and for invalid options.
    """

    sliding_window: Annotated[int | None, optional(TOKENS)] = None
    """How many of the latest tokens its layers attend to. By default all or, for heads that know
    it, the length of the rows of training.
    """
    sinks: Annotated[int, SINKS] = 0
    """How many first tokens they attend to besides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(sliding_window=self.sliding_window, sinks=self.sinks)

    @property
    def own_positions(self) -> int:
        """The number of positions for which the drafter's own layers are configured."""
        raise NotImplementedError

    @property
    def slides(self) -> bool:
        """Whether the layers work at any position if they attend to few tokens: by distances."""
        return True

    @property
    def max_positions(self) -> int | None:
        """The number of positions in which the drafter drafts; None with a window that fits."""
        window = self.sliding_window
        in_window = window is not None and window <= self.own_positions
        return None if in_window and self.slides else self.own_positions

    @property
    def attention_window(self) -> SlidingWindow | None:
        """The sliding window of the drafter's layers, or None."""
        if self.sliding_window is None:
            return None
        return SlidingWindow(self.sliding_window, sinks=self.sinks)


def check_window(*, sliding_window: int | None = None, sinks: int = 0, **others: Any) -> None:
    """Raise InputError for options of an `OwnCacheDrafter` with sinks but no window."""
    del others
    if sinks and sliding_window is None:
        raise InputError(
            f"drafter.sinks={sinks}: sinks are kept in addition to a window; set "
            "drafter.sliding_window too, or leave sinks out"
        )
