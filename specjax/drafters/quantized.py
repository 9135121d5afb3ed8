"""A drafter that is the target with its weights in fewer bits.

It reads the target's cache, so what it drafts from are the target's own keys and values; the
verification writes those of accepted tokens. (QuantSpec: Tiwari et al. 2502.10424; QSpec: Zhao et
al. 2410.11305.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from specjax.drafters.autoregressive import SelfDrafter
from specjax.drafters.base import Context, LoadedDrafter
from specjax.errors import InputError
from specjax.fields import Instance
from specjax.loading.model import Model, count_bytes
from specjax.loading.weights import in_stacked_form, quantized_model
from specjax.models.decoder import Decoder
from specjax.models.interface import LanguageModel

_DECODER = Instance(Decoder, "use the architecture of a target")


@dataclass(frozen=True, kw_only=True)
class Quantized(SelfDrafter):
    """A drafter with the target's layers in fewer bits.

    `model` are the layers as functions of the quantised parameters, whose kernels are in `weights`:
    int8, or int4. Raises InputError for bad options.
    """

    name: ClassVar[str] = "quantized"
    model: Annotated[Decoder, _DECODER] = field(kw_only=False)
    weights: Literal["int8", "int4"] | None = None

    @classmethod
    def load(cls, name: str, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
        """Return the drafter of a target, with parameters of its own.

        Without `weights` these are in 8 bits, or in 4 where the target's are in 8. Raises
        InputError for a target on a mesh, or whose weights have no more bits.
        """
        del name, path
        weights = cls(target.architecture, **options).weights
        choices = ("int8", "int4") if weights is None else (weights,)
        for choice in choices:
            copy = quantized_model(in_stacked_form(target), choice)
            if count_bytes(copy.params) < count_bytes(target.params):
                drafter = cls(copy.architecture, **{**options, "weights": choice})
                return LoadedDrafter(drafter, copy.params)
        raise InputError(
            f"drafter.weights={choices[-1]}: the target's weights are {target.weights} already; "
            "load the target with weights='float' or 'int8', or use another drafter"
        )

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return all of the layers, in fewer bits."""
        del context
        return self.model, params, None
