"""The base class of drafters with trained weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specjax.core.drafter import LoadedDrafter
from specjax.core.growth.autoregressive import ChainDrafter
from specjax.loading.model import Model
from specjax.methods.heads.examined import Examined
from specjax.methods.heads.head import Head


@dataclass(frozen=True, kw_only=True)
class HeadDrafter(Examined, ChainDrafter):
    """A drafter with a head that was trained for one target."""

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a head; `params` are the result of `complete_parameters`.

        `options` are those of the drafter.
        """
        raise NotImplementedError
