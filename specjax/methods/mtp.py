"""Drafters of multi-token prediction modules (DeepSeek-V3, 2412.19437); see `pair_drafter`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from specjax.core.drafter import LoadedDrafter
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.find_head import shipped_head
from specjax.methods.heads.head import own_modules
from specjax.methods.heads.head_drafter import DraftWeights
from specjax.methods.heads.pair_drafter import PairDrafter
from specjax.models.mtp import Mtp


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(PairDrafter):
    """A drafter with MTP modules (multi-token prediction): the target's own, or a trained head.

    It drafts one token by default, as the authors of GLM-4.7 recommend for its single module.
    """

    name: ClassVar[str] = "mtp"
    head: Mtp = field(kw_only=False)
    head_class = Mtp
    usual_length: ClassVar[int] = 1

    @classmethod
    def load(
        cls,
        name: str,
        target: Model,
        path: Any = None,
        *,
        weights: DraftWeights = "auto",
        **options: Any,
    ) -> LoadedDrafter:
        """Load the head at `path`, by default the target's own modules or the bundled head.

        `weights` is the storage of kernels (`DRAFT_WEIGHTS`). Raises InputError if there is none.
        """
        if path is not None:
            return super().load(name, target, path, weights=weights, **options)
        if (head := own_modules(target) or shipped_head("mtp", target)) is None:
            raise InputError(
                f"drafter.name=mtp: {target.name} has no MTP modules, and none come with specjax "
                "for it; give trained ones as drafter.path=, or use another drafter"
            )
        params = complete_parameters(head, target, weights)
        return cls.of_head(head, params, target, **options)
