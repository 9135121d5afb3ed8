"""A drafter that is the target in fewer bits: its weights, its activations, or both.

It drafts from the target's own cache; verification writes the keys and values of accepted tokens.
(QuantSpec: Tiwari et al. 2502.10424; QSpec: Zhao et al. 2410.11305.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from specjax.core.drafter import Context, LoadedDrafter
from specjax.core.language_model import LanguageModel
from specjax.core.parameter_sizes import count_bytes
from specjax.errors import InputError
from specjax.fields import Instance
from specjax.loading.model import Model
from specjax.loading.quantize import (
    has_quantized,
    in_stacked_form,
    quantized_model,
    with_activation_bits,
)
from specjax.loading.user_messages import note
from specjax.methods.method import Method
from specjax.methods.self_drafter import SelfDrafter
from specjax.models.decoder import Decoder

_ACTIVATION_BITS = {None: None, "float": None, "8": 8, "4": 4}
_FEWER_BYTES = 0.8
"""A copy in fewer bits is made by default if it has at most this share of the target's bytes."""
_DECODER = Instance(Decoder, "use the architecture of a target")


@dataclass(frozen=True, kw_only=True)
class Quantized(SelfDrafter):
    """A drafter with the target's layers in fewer bits.

    `model` has the layers as functions of quantized parameters, with kernels in `weights` (int8 or
    int4). With `activations`, the inputs of the kernels, but for the output head, are rounded to
    that many bits too, by default where the target has hardly more bits than the drafter would
    have. On one CPU products of 8 bits are multiplied as such; elsewhere, and of 4 bits, rounding
    is emulated: acceptance is that of low-bit products, but the time is that of others. Raises
    InputError for invalid options.
    """

    name: ClassVar[str] = "quantized"
    model: Annotated[Decoder, _DECODER] = field(kw_only=False)
    weights: Literal["int8", "int4"] | None = None
    """The form of the copy's kernels, by default int8, or int4 if the target has 8 bits."""
    activations: Literal["float", "8", "4"] | None = None
    """The bits to which the inputs of kernels are rounded; by default 8 if the target has hardly
    more bits than the copy would have."""

    @classmethod
    def of_target(cls, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter that is the target in fewer bits.

        `weights` is by default "int8", or "int4" if the target has 8 bits or fewer. The drafter has
        its own parameters. Where activations are rounded and `weights` is not given, it shares
        those of a quantized target; a target that has hardly more bits than "int4" gives is drafted
        for in this way by default, with activations of 8 bits, and a line says so. Raises
        InputError for `weights` that are not fewer bits than the target's unless activations are
        rounded, for a width that is no multiple of 32, and for invalid options.
        """
        if isinstance(options.get("activations"), int):
            options["activations"] = str(options["activations"])
        drafter = cls(target.architecture, **options)
        shares = drafter.weights is None and has_quantized(target.params)
        bits = _ACTIVATION_BITS[drafter.activations]
        if bits is not None and shares:
            return LoadedDrafter(drafter, with_activation_bits(target.params, bits))
        choices = ("int8", "int4") if drafter.weights is None else (drafter.weights,)
        for choice in choices:
            copy = quantized_model(
                in_stacked_form(target),
                choice,
                field="drafter.weights",
                remedy="another drafter",
            )
            fewer = 1.0 if drafter.weights else _FEWER_BYTES
            if bits is not None or count_bytes(copy.params) < fewer * count_bytes(target.params):
                params = with_activation_bits(copy.params, bits)
                return LoadedDrafter(
                    replace(drafter, model=copy.architecture, weights=choice), params
                )
        if shares and drafter.activations is None:
            note(
                f"quantized: the target's weights are {target.weights} already, so it drafts with "
                "them and activations of 8 bits"
            )
            params = with_activation_bits(target.params, 8)
            return LoadedDrafter(replace(drafter, activations="8"), params)
        setting = f"activations={drafter.activations}" if shares else f"weights={choices[-1]}"
        raise InputError(
            f"drafter.{setting}: the target's weights are {target.weights} already; load the "
            "target with weights='float' or 'int8', set drafter.activations to 8 or 4, or "
            "use another drafter"
        )

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the model with fewer bits, its parameters, and None, since all layers run."""
        del context
        return self.model, params, None


QUANTIZED = Method(
    name=Quantized.name,
    paper="2502.10424, 2410.11305",
    drafter=Quantized,
    of_target=Quantized.of_target,
    in_all=False,
)
