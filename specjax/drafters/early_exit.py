"""A drafter of the target's own first layers, with its final norm and head.

It reads the target's cache, which holds exactly the keys and values that it would have written;
only the round's window is its own. (LayerSkip: Elhoushi et al. 2404.16710.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxtyping import Array, Float

from specjax.cache import Window
from specjax.drafters.autoregressive import ChainDrafter
from specjax.drafters.base import Context, LoadedDrafter, Noise
from specjax.drafters.growth.level import Level, root_level
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.loading.model import Model
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
        """Return the drafter of a target's own layers."""
        del name, path
        return LoadedDrafter(cls(target.config.num_layers, **options))

    @property
    def name(self) -> str:
        """Its registered name."""
        return "early_exit"

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Draft a chain or a tree with the first layers, which read the target's cache."""
        del params
        num_layers = self.exit_layer or max(1, self.num_layers // 2)

        def step(level: Level, window: Window) -> tuple[Float[Array, "B T V"], Window]:
            result = context.target.extend(
                context.params,
                level.tokens,
                level.positions(context),
                context.cache,
                window,
                level.start,
                level.visible,
                num_layers=num_layers,
            )
            return result.logits, result.window

        window = context.target.make_window(context.length.shape[0], self.window_slots)
        logits, window = step(root_level(context, self.window_slots), window)
        draft, _ = self.draft(logits, step, window, context, noise)
        return draft, state
