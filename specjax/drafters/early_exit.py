"""The target's own first layers draft, through its final norm and head.

They read the target's cache, which holds exactly what they would have written; only the round's
window is their own. (LayerSkip: Elhoushi et al. 2404.16710.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.cache import Window
from specjax.drafters.autoregressive import ChainDrafter
from specjax.drafters.base import Context, LoadedDrafter, Noise
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.loading.model import Model
from specjax.models.masks import causal
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class EarlyExit(ChainDrafter):
    """A drafter that runs the first `exit_layer` of the target's `num_layers` (half by default).

    Raises InputError for a layer out of range or bad options.
    """

    num_layers: Annotated[int, Whole(1)] = field(kw_only=False)
    exit_layer: Annotated[int, Whole(1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None and self.exit_layer > self.num_layers:
            raise InputError(
                f"drafter.exit_layer={self.exit_layer}: the target has {self.num_layers} layers; "
                f"use 1 to {self.num_layers}"
            )

    @classmethod
    def load(cls, name: str, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
        """The drafter of a target's own layers."""
        del name, path
        return LoadedDrafter(cls(target.config.num_layers, **options))

    @property
    def name(self) -> str:
        """Its registered name."""
        return "early_exit"

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """A chain from the first layers, which read the target's cache."""
        del params
        slots = max(self.num_speculative_tokens, 1)
        num_layers = self.exit_layer or max(1, self.num_layers // 2)

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], window: Window
        ) -> tuple[Float[Array, "B V"], Window]:
            result = context.target.extend(
                context.params,
                token[:, None],
                (context.length - 1 + depth)[:, None],
                context.cache,
                window,
                depth,
                causal(jnp.asarray(depth)[None], slots),
                num_layers=num_layers,
            )
            return result.logits[:, 0], result.window

        window = context.target.make_window(context.length.shape[0], slots)
        draft, _ = self.draft(
            step,
            window,
            context,
            noise,
        )
        return draft, state
