"""The base classes of drafters with trained weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Array, UInt32

from specjax.core.drafter import LoadedDrafter
from specjax.core.growth.autoregressive import ChainDrafter
from specjax.loading.formats.build_parameters import can_split
from specjax.loading.model import Model
from specjax.methods.heads.complete_parameters import with_digest
from specjax.methods.heads.examined import Examined
from specjax.methods.heads.head import Head
from specjax.methods.heads.own_cache import OwnCacheDrafter
from specjax.methods.heads.shared_parameters import share_anew
from specjax.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class HeadDrafter(Examined, ChainDrafter):
    """A drafter with a head that was trained for one target."""

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a head; `params` are the result of `complete_parameters`.

        `options` are those of the drafter.
        """
        raise NotImplementedError

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that the head reads."""
        return self.head.config.features

    def text_digests(self, params: Any) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the hash of the head's parameters, which those of a whole model do not have.

        The head may have been trained on an output of the same seed and prompt.
        """
        return (params["digest"],) if isinstance(params, dict) and "digest" in params else ()

    def with_new_digests(self, params: Any, before: Any) -> Any:
        """Return `params` with a hash of the head's parameters and of all that they replaced."""
        hashed = isinstance(params, dict) and "digest" in params
        return with_digest(params, before["digest"]) if hashed else params

    def for_target(self, params: Any, target_params: Any) -> Any:
        """Return `params` with the embedding and the output head of `target_params`."""
        return share_anew(params, target_params)


@dataclass(frozen=True, kw_only=True)
class LayersDrafter(OwnCacheDrafter, HeadDrafter):
    """A drafter with a head of decoder layers, and a cache for them.

    Its parameters have "shared" and, for a draft vocabulary, "draft_ids".
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        head = replace(self.head, sliding_window=self.attention_window)
        object.__setattr__(self, "head", head)

    @staticmethod
    def functions_of(kind: type, head: Head, target: Model) -> Any:
        """Return the functions, of the class `kind`, of a head for its target.

        Caches are sharded like the target's if the head's number of heads allows, and are read in
        the form that the target uses.
        """
        return kind(
            head.config,
            target.activation_dtype,
            target.multiply,
            shards=target.shards if can_split(head.config.decoder, target.shards) else 1,
            form=target.form,
            cache_dtype=target.cache_dtype,
        )

    @property
    def own_positions(self) -> int:
        """The number of positions of the head's layers."""
        return self.layers_config.max_positions

    @property
    def layers_config(self) -> DecoderConfig:
        """The config of the head's layers."""
        return self.head.config.decoder
