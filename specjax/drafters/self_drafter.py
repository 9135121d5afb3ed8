"""The base class of drafters that run the target's layers, or a copy of them, over its cache.

The target's cache holds exactly the keys and values of committed tokens that they read; only the
round's window is their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from specjax.cache import Window
from specjax.drafters.autoregressive import ChainDrafter
from specjax.drafters.base import Context, Noise
from specjax.drafters.growth.level import Level, root_level
from specjax.models.interface import LanguageModel
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class SelfDrafter(ChainDrafter):
    """A drafter that is a cheaper form of the target itself."""

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return a model whose layers fit the target's cache, its parameters, and how many to run.

        None runs all of them.
        """
        raise NotImplementedError

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Draft a chain or a tree with the model, which reads the target's cache."""
        model, model_params, num_layers = self.layers(params, context)

        def step(level: Level, window: Window) -> tuple[Float[Array, "B T V"], Window]:
            result = model.extend(
                model_params,
                level.tokens,
                level.positions(context),
                context.cache,
                window,
                level.start,
                level.visible,
                num_layers=num_layers,
            )
            return result.logits, result.window

        window = model.make_window(context.length.shape[0], self.window_slots)
        logits, window = step(root_level(context, self.window_slots), window)
        draft, _ = self.draft(logits, step, window, context, noise)
        return draft, state
