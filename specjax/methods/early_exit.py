"""A drafter that runs the target's first layers, then its final norm and output head.

(LayerSkip: Elhoushi et al. 2404.16710.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from specjax.core.drafter import Context, LoadedDrafter
from specjax.core.language_model import LanguageModel
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.loading.model import Model
from specjax.loading.user_messages import note
from specjax.methods.layer_choice import choose, draft_cost, exit_acceptance
from specjax.methods.method import Method, Training
from specjax.methods.self_drafter import SelfDrafter

_EXIT = Whole(1, remedy="use a whole number of at least 1, or auto")


@dataclass(frozen=True, kw_only=True)
class EarlyExit(SelfDrafter):
    """A drafter that runs the first `exit_layer` of the target's layers, by default half of them.

    Raises InputError for a layer out of range and for invalid options.
    """

    name: ClassVar[str] = "early_exit"
    num_layers: Annotated[int, Whole(1)] = field(kw_only=False)
    exit_layer: Annotated[int, Whole(1)] | None = None
    """How many of the target's first layers draft, by default half of them; auto measures which
    number is best.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit_layer is not None and self.exit_layer > self.num_layers:
            raise InputError(
                f"drafter.exit_layer={self.exit_layer}: the target has {self.num_layers} layers; "
                f"use 1 to {self.num_layers}"
            )

    @classmethod
    def of_target(
        cls,
        target: Model,
        *,
        exit_layer: Literal["auto"] | Annotated[int, _EXIT] | None = None,
        **options: Any,
    ) -> LoadedDrafter:
        """Return the drafter that runs the first layers of `target`.

        With "auto" the target reads a short text, and the exit is the one with the greatest
        estimated speed-up by the acceptance and cost of its drafts; a message says which. Raises
        InputError for a layer out of range, and for "auto" if there is no earlier exit.
        """
        count = target.config.num_layers
        if exit_layer != "auto":
            return LoadedDrafter(cls(count, exit_layer=exit_layer, **options))
        drafter = cls(count, **options)
        if count < 2:
            raise InputError("drafter.exit_layer='auto': the target has one layer; leave it out")
        costs = [draft_cost(target, layers) for layers in range(1, count)]
        best = choose(exit_acceptance(target), costs, drafter.num_speculative_tokens)
        chosen = replace(drafter, exit_layer=best.index + 1)
        note(
            f"early_exit: exit_layer={chosen.exit_layer} of {count} is best on a short text; {best}"
        )
        return LoadedDrafter(chosen)

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the target, its parameters, and the number of layers to run."""
        del params
        return context.target, context.params, self.exit_layer or max(1, self.num_layers // 2)


EARLY_EXIT = Method(
    name=EarlyExit.name,
    paper="2404.16710",
    drafter=EarlyExit,
    of_target=EarlyExit.of_target,
    training=(Training("layerskip", "train.layerskip", "configs/train_layerskip.py", alone=False),),
)
