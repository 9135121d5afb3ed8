"""A drafter that is the target without some of its layers (Zhang et al. 2309.08168).

It needs no training. Which layers are left out is fixed when it is made, and by default chosen by
the dynamic program of CLaSp (Chen et al. 2505.24196), which runs once, on a short text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from specjax.core.drafter import Context, LoadedDrafter
from specjax.core.language_model import LanguageModel
from specjax.errors import InputError
from specjax.fields import Items, Whole, optional
from specjax.loading.model import Model
from specjax.loading.user_messages import note
from specjax.methods.layer_choice import choose, draft_cost, leave_out
from specjax.methods.method import Method
from specjax.methods.self_drafter import SelfDrafter
from specjax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class LayerSkip(SelfDrafter):
    """A drafter that runs the target without some of its layers.

    `skipped` are their numbers, from 0 on. The drafter reads the target's cache, which has the keys
    and values of all layers. Its own window lacks those of skipped layers, and is dropped:
    verification runs all layers. Raises InputError for layers that the target lacks, or if none
    would be left, and for invalid options.
    """

    name: ClassVar[str] = "layer_skip"
    num_layers: Annotated[int, Whole(1)] = field(kw_only=False)
    skipped: Annotated[tuple[int, ...], Items(Whole())] = ()
    """The numbers of the layers that are left out, from 0; by default chosen on a short text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "skipped", tuple(sorted({*self.skipped})))
        if self.skipped and self.skipped[-1] >= self.num_layers:
            raise InputError(
                f"drafter.skipped={self.skipped}: the target has {self.num_layers} layers; use "
                f"layers from 0 to {self.num_layers - 1}"
            )
        if len(self.skipped) == self.num_layers:
            raise InputError(f"drafter.skipped={self.skipped}: leaves no layer; skip fewer")

    @classmethod
    def of_target(
        cls,
        target: Model,
        *,
        skip_layers: Annotated[
            int | None,
            optional(Whole(1)),
            "How many layers are left out, by default as many as are estimated to be fastest.",
        ] = None,
        **options: Any,
    ) -> LoadedDrafter:
        """Return the drafter for a target, without the layers `skipped` if they are given.

        Otherwise the target reads a short text, and the `skip_layers` layers that change its states
        least are left out, by default as many, up to half, as have the greatest estimated speed-up;
        a message says which. Raises InputError for numbers out of range and for a target with one
        layer.
        """
        count = target.config.num_layers
        drafter = cls(count, **options)
        if drafter.skipped:
            if skip_layers is not None:
                raise InputError(
                    f"drafter.skip_layers={skip_layers}: drafter.skipped says which layers are "
                    "left out; leave one of them out"
                )
            return LoadedDrafter(drafter)
        if count < 2:
            raise InputError(
                f"drafter=layer_skip: {target.name} has one layer, which it needs; use another "
                "drafter"
            )
        if skip_layers is not None and skip_layers >= count:
            raise InputError(
                f"drafter.skip_layers={skip_layers}: the target has {count} layers; use 1 to "
                f"{count - 1}"
            )
        options_by_number = leave_out(target, skip_layers or count // 2)
        if skip_layers is not None:
            options_by_number = options_by_number[-1:]
        costs = [draft_cost(target, count - len(left.layers)) for left in options_by_number]
        acceptance = [left.acceptance for left in options_by_number]
        best = choose(acceptance, costs, drafter.num_speculative_tokens)
        skipped = options_by_number[best.index].layers
        note(
            f"layer_skip: leaves out {len(skipped)} of {count} layers "
            f"({', '.join(map(str, skipped))}), chosen on a short text; {best}"
        )
        return LoadedDrafter(replace(drafter, skipped=skipped))

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the target without the skipped layers, and its parameters.

        Raises InputError for a target that is no `Decoder`.
        """
        del params
        if not isinstance(context.target, Decoder):
            raise InputError("drafter=layer_skip: the target is no decoder with layers")
        return replace(context.target, skipped=self.skipped), context.params, None


LAYER_SKIP = Method(
    name=LayerSkip.name,
    paper="2309.08168",
    drafter=LayerSkip,
    of_target=LayerSkip.of_target,
)
