"""P-EAGLE heads (2602.01469): EAGLE-3 heads that draft all depths in one pass.

The pair of x_{t+1} and the fused features f_t predicts the first draft token, as in EAGLE-3. The
further ones are predicted at the next positions by masks: pairs of the token `mask_token_id` and a
learned vector in place of the features, which attend to all pairs and to earlier masks. The first
layer is EAGLE-3's; further ones are Llama's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.methods.eagle.head import Eagle, EagleConfig
from specjax.models.parameter_table import parameter_table as decoder_table
from specjax.models.parameters import Parameter

KIND = "peagle"
"""The kind of head, and the drafter's name: that of the speculators library and vLLM."""


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(EagleConfig):
    """The config of a P-EAGLE head: EAGLE-3's (`version` 3) with any number of layers.

    `mask_token_id` is the token whose embedding the masks have. Raises InputError for values that
    are inconsistent.
    """

    mask_token_id: Annotated[int, Whole(0)]
    most_layers = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != 3:
            raise InputError(f"version={self.version}: a {KIND} head is EAGLE-3's; use 3")
        if self.norm_output:
            raise InputError("norm_output=True: no draft step reads an output; leave it out")
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise InputError(
                f"mask_token_id={self.mask_token_id}: must be one of the target's "
                f"{self.decoder.vocab_size} tokens"
            )

    @property
    def kind(self) -> str:
        """The kind of head and the drafter's name."""
        return KIND

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the head's parameters, as a nested dict of `Parameter`.

        "mask" is the vector in place of the joined features, and "layers" has those after the
        first by their numbers.
        """
        table = super().parameter_table()
        # The axes are those of files.
        shape = (1, 1, len(self.taps) * self.target_hidden_size)
        table["mask"] = {"features": Parameter(shape, (None, None, None))}
        layers = decoder_table(self.decoder, scan_layers=False)["layers"]
        if further := {number: layer for number, layer in layers.items() if number != "0"}:
            table["layers"] = further
        return table


@dataclass(frozen=True)
class PEagle(Eagle):
    """A P-EAGLE head as plain functions of its parameters; hashable."""

    config: PEagleConfig

    def layer(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        """Return the parameters of a layer, as `inputs`, `heads` and `finish` take them."""
        return {"layer": params["layers"][str(index)]} if index else params

    def masks(
        self, params: dict[str, Any], *shape: int
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T D"]]:
        """Return tokens and hidden states of masks, [B, T] = `shape`."""
        taps = jnp.split(params["mask"]["features"], len(self.config.taps), axis=2)
        fused = self.fuse(params, dict(zip(self.config.taps, taps, strict=True)))
        tokens = jnp.full(shape, self.config.mask_token_id, jnp.int32)
        return tokens, jnp.broadcast_to(fused, (*shape, fused.shape[2]))

    def inputs(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T Din"]]:
        """Return the residual stream and attention's input of a layer.

        A layer after the first reads its norm of the hidden states alone.
        """
        if norm := params["layer"].get("attention_norm"):
            return hidden, self.arithmetic.norm(hidden, norm)
        return super().inputs(params, tokens, hidden, positions)

    def extend(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        window: Window,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        only: Int[Array, "B"] | Int[Array, "B Q"] | None = None,
        layer: int = 0,
    ) -> tuple[Float[Array, "B Q D"], Window]:
        """Run the layers from `layer` on over T pairs; return outputs and window as `PairHead`."""
        last = self.config.decoder.num_layers - 1
        for index in range(layer, last + 1):
            hidden, window = super().extend(
                self.layer(params, index),
                *(tokens, hidden, positions, cache, window, start, visible),
                only if index == last else None,
                index,
            )
        return hidden, window
