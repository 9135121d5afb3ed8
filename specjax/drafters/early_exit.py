"""A drafter that runs the target's first layers, then its final norm and output head.

(LayerSkip: Elhoushi et al. 2404.16710.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from specjax.drafters.autoregressive import SelfDrafter
from specjax.drafters.base import Context, LoadedDrafter
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.loading.model import Model
from specjax.models.interface import LanguageModel


@dataclass(frozen=True, kw_only=True)
class EarlyExit(SelfDrafter):
    """A drafter that runs the first `exit_layer` of the target's layers, by default half of them.

    Raises InputError for a layer out of range and for invalid options.
    """

    name: ClassVar[str] = "early_exit"
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
        """Return the drafter `name` that runs the first layers of `target`; `path` is not used.

        `options` are the keyword-only fields.
        """
        del name, path
        return LoadedDrafter(cls(target.config.num_layers, **options))

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the target, its parameters, and the number of layers to run."""
        del params
        return context.target, context.params, self.exit_layer or max(1, self.num_layers // 2)
