"""A small language model that shares its target's embedding and columns of its output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.core.draft_vocabulary import check_draft_vocab_size
from specjax.core.language_model import Extension
from specjax.errors import InputError
from specjax.methods.draft_model.wrapped import WrappedModel
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.head_config import HeadConfig
from specjax.models.layers.decoder_layer import final_logits
from specjax.models.parameter_table import parameter_table as decoder_table

KIND = "draft_model"
"""The kind of head, and the drafter's name."""


@dataclass(frozen=True)
class DraftModelConfig(HeadConfig):
    """A decoder of the target's width and vocabulary, with logits for Vd tokens only."""

    decoder: DecoderConfig
    draft_vocab_size: int

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size, self.decoder.vocab_size)
        if self.decoder.experts is not None:
            raise InputError(
                "experts: a draft model that starts as its target's layers has none; use a whole "
                "model as draft model"
            )
        if self.decoder.embedding.positions:
            raise InputError(
                "embedding.positions=True: a draft model that shares its target's embedding has no "
                "embedding of positions; use a whole model as draft model"
            )

    @property
    def kind(self) -> str:
        """The kind of head."""
        return KIND

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the model's own parameters, as `models.parameter_table`."""
        table = decoder_table(self.decoder)
        return {name: table[name] for name in ("layers", "final_norm")}


@dataclass(frozen=True)
class ReducedDecoder(WrappedModel):
    """The draft model as pure functions; a `LanguageModel`, but with logits [B, T, Vd]; hashable.

    `params` has the model's own "layers" and "final_norm", and under "shared" the target's
    embedding and the columns of its output head (`shared_parameters.share`).
    """

    decoder: Decoder

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the model's input vocabulary (V)."""
        return self.decoder.vocab_size

    def extend(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None,
        window: Window | None,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        *,
        features: tuple[str, ...] = (),
        logits: bool = True,
        num_layers: int | None = None,
    ) -> Extension:
        """Run T tokens as `LanguageModel.extend` does, but with logits [B, T, Vd].

        The arguments are those of `LanguageModel.extend`.
        """
        shared = dict(params["shared"])
        shared.pop("draft_head", None)
        if "head" not in shared:
            # The embedding is a table of its own; the decoder needs some head, which is never read.
            shape = (self.decoder.config.hidden_size, self.vocab_size)
            shared["head"] = {"kernel": jnp.broadcast_to(jnp.zeros((), self.decoder.dtype), shape)}
        decoder_params = {
            **shared,
            "layers": params["layers"],
            "final_norm": params["final_norm"],
        }
        requested = features
        if logits and "final_norm" not in features:
            requested = (*features, "final_norm")
        result = self.decoder.extend(
            decoder_params,
            tokens,
            positions,
            cache,
            window,
            start,
            visible,
            features=requested,
            logits=False,
            num_layers=num_layers,
        )
        draft_logits = None
        if logits:
            draft_logits = self.logits(params, result.features["final_norm"])
        kept = {name: result.features[name] for name in features}
        return Extension(draft_logits, kept, result.window)

    def logits(
        self, params: dict[str, Any], final_norm: Float[Array, "B T D"]
    ) -> Float[Array, "B T Vd"]:
        """Return draft logits in float32 from `final_norm` features."""
        layer = self.decoder.arithmetic
        head = params["shared"]["draft_head"]
        logits = layer.project("btd,dv->btv", final_norm, head, jnp.float32)
        return final_logits(logits, self.decoder.config)
