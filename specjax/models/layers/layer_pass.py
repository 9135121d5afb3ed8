"""The step of one layer in a pass over T tokens, and the state carried between layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.models.layers.attention import Partial, attend, attend_in_blocks, ungroup
from specjax.models.layers.decoder_layer import DecoderLayer, at_layer
from specjax.models.layers.local_and_global_layers import LayerView


@struct.dataclass
class LayerCarry:
    """The state carried from one layer to the next.

    `x` is the residual stream, `window` has the keys and values of the layers so far,
    `layer_inputs` are the requested features by name, `experts` are each token's experts in the M
    sparse layers, and `queries` are those of each layer.
    """

    x: Float[Array, "B T D"]
    window: Window | None
    layer_inputs: dict[str, Float[Array, "B T D"]]
    experts: Int[Array, "M B T K"] | None
    queries: Float[Array, "B T L H C"] | None = None


@dataclass(frozen=True)
class LayerPass:
    """The step of one layer, as a function of the layer's index, its weights and the carry.

    `views(index)` are the rotation and the masks of a layer. `attend_all` is the attention over
    window and cache, if there is a cache; without a window (training) tokens attend only to each
    other. New keys are written to the window's slots from `start` on. `tapped_layers` maps feature
    names to the layers whose inputs are kept. Where `kept` is False, a row leaves a layer out and
    passes its input on.
    """

    layer: DecoderLayer
    views: Callable[[Int[Array, ""] | int], LayerView]
    cache: KVCache | None
    attend_all: Callable[..., Partial] | None
    start: Int[Array, ""] | int
    tapped_layers: Mapping[str, int]
    kept: Bool[Array, "L B"] | None = None

    def __call__(
        self, index: Int[Array, ""] | int, weights: dict[str, Any], carry: LayerCarry
    ) -> LayerCarry:
        """Run layer `index` and return the carry after it."""
        layer, config, x = self.layer, self.layer.config, carry.x
        layer_inputs = {
            name: jnp.where(index == self.tapped_layers[name], x, before)
            for name, before in carry.layer_inputs.items()
        }
        view = self.views(index)
        h = layer.normed_input(x, weights, "attention_norm")
        copies = 1 if carry.window is None else carry.window.k.shape[2] // config.num_kv_heads
        query, key, value = layer.heads(h, weights["attention"], view.rotation, copies)
        mixed, window = self._attend(index, view, carry.window, query, key, value)
        queries = carry.queries
        if queries is not None:
            queries = queries.at[:, :, index].set(ungroup(query, x.shape[1]))
        x = layer.add_attention(x, mixed, weights)
        x, chosen = layer.add_mlp(x, weights)
        if self.kept is not None:
            x = jnp.where(self.kept[index][:, None, None], x, carry.x)
        experts = carry.experts
        if experts is not None and chosen is not None:
            experts = experts.at[index - (config.num_layers - config.num_sparse)].set(chosen)
        return LayerCarry(x, window, layer_inputs, experts, queries)

    def _attend(
        self,
        index: Int[Array, ""] | int,
        view: LayerView,
        window: Window | None,
        query: Float[Array, "B G X C"],
        key: Float[Array, "B T G C"],
        value: Float[Array, "B T G C"],
    ) -> tuple[Partial, Window | None]:
        """Return the attention result, and the window with the new keys and values written."""
        softcap = self.layer.config.attention.softcap
        if window is None:
            mixed = attend_in_blocks(
                query,
                key.transpose(0, 2, 1, 3),
                value.transpose(0, 2, 1, 3),
                view.seen,
                softcap=softcap,
                rounded=self.layer.multiply is not None,
            )
            return mixed, None
        if self.cache is not None:
            key, value = self.cache.rounded(key), self.cache.rounded(value)
        window = window.replace(
            k=write_window(window.k, key, index, self.start),
            v=write_window(window.v, value, index, self.start),
        )
        if self.attend_all is not None:
            limits = view.seen, view.oldest
            return self.attend_all(query, self.cache, window, index, *limits), window
        keys, values = at_layer(window.k, index), at_layer(window.v, index)
        return attend(query, keys, values, view.seen, softcap), window


def write_window(
    window: Float[Array, "L B G W C"],
    new: Float[Array, "B T G C"],
    layer: Int[Array, ""] | int,
    start: Int[Array, ""] | int,
) -> Float[Array, "L B G W C"]:
    """Return a window's keys or values with `new` written to slots start..start+T of a layer."""
    new = new.transpose(0, 2, 1, 3)[None].astype(window.dtype)
    where = (layer, 0, 0, start, 0)
    return lax.dynamic_update_slice(window, new, where, allow_negative_indices=False)
