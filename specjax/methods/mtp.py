"""Drafters of multi-token prediction modules (DeepSeek-V3, 2412.19437); see `pair_drafter`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from specjax.loading.model import Model
from specjax.methods.heads.examined import NORM, Variation
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.own_cache import check_window
from specjax.methods.heads.pair_drafter import PairDrafter
from specjax.methods.method import Method, Needs, OwnHead, Training, VllmMethod
from specjax.models.mtp import Mtp, MtpConfig


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(PairDrafter):
    """A drafter with MTP modules (multi-token prediction): the target's own, or a trained head.

    It drafts one token by default, as the authors of GLM-4.7 recommend for its single module.
    """

    name: ClassVar[str] = "mtp"
    head: Mtp = field(kw_only=False)
    head_class = Mtp
    usual_length: ClassVar[int] = 1

    def taps_remedy(self, taps: str) -> str:
        """Return what to set for module 0 to read the feature `taps`."""
        return f"hidden={taps} in the head's config"

    def variations(self) -> Iterator[Variation]:
        """Yield drafters with outputs read before or after the norm, or inputs in another order."""
        config = self.head.config
        if self.num_speculative_tokens > 1:
            opposite = {"normed": "raw", "raw": "normed"}[config.recursion]
            yield self.with_setting(NORM, "recursion", opposite)
        swapped = {"embedding_first": "hidden_first", "hidden_first": "embedding_first"}
        yield self.with_setting(NORM, "concat", swapped[config.concat])


def own_modules(model: Model) -> Head | None:
    """Return a model's MTP modules as a head for that model, or None if it has none."""
    if model.mtp is None:
        return None
    config = model.mtp.config
    return Head(config.kind, config, model.mtp.params, None, TargetMetadata.of(model))


def _own_config(model: Model) -> MtpConfig | None:
    """Return the config of a model's MTP modules, or None if it has none."""
    return None if model.mtp is None else model.mtp.config


MTP = Method(
    name=MtpDrafter.name,
    paper="2412.19437",
    drafter=MtpDrafter,
    needs=Needs.MODULES,
    head=MtpConfig,
    own_head=OwnHead("MTP modules", _own_config, own_modules),
    check=check_window,
    vllm=VllmMethod(ending="_mtp"),
    training=(Training("mtp", "train.mtp", "configs/train_mtp.py", ("--config.mtp.export=head",)),),
)
