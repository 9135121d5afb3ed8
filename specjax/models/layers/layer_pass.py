"""The step of one layer in a pass over T tokens, and the state carried between layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.models.config import LayerRun
from specjax.models.layers.attention import Partial, attend, attend_in_blocks, ungroup
from specjax.models.layers.decoder_layer import DecoderLayer, at_layer
from specjax.models.layers.local_and_global_layers import LayerView
from specjax.models.layers.recurrence import (
    Ancestors,
    RecurrentLayer,
    RecurrentPass,
    empty_state,
    empty_window,
)


@struct.dataclass
class LayerCarry:
    """The state carried from one layer to the next.

    `x` is the residual stream, `window` has the keys and values of the layers so far,
    `layer_inputs` are the requested features by name, `experts` are each token's experts in the M
    sparse layers, and `queries` are those of each layer with attention.
    """

    x: Float[Array, "B T D"]
    window: Window | None
    layer_inputs: dict[str, Float[Array, "B T D"]]
    experts: Int[Array, "M B T K"] | None
    queries: Float[Array, "B T L H C"] | None = None


@dataclass(frozen=True)
class LayerPass:
    """The step of one layer, as a function of the layer's index, its weights and the carry.

    `views(index)` are the rotation and the masks of a layer with attention, and `ancestors` are
    what tokens see in recurrent layers. `attend_all` is the attention over window and cache, if
    there is a cache; without a window (training) tokens attend only to each other. New keys are
    written to the window's slots from `start` on. `tapped_layers` maps feature names to the layers
    whose inputs are kept. Where `kept` is False, a row leaves a layer out and passes its input on.
    """

    layer: DecoderLayer
    views: Callable[[Int[Array, ""] | int], LayerView]
    ancestors: Ancestors | None
    cache: KVCache | None
    attend_all: Callable[..., Partial] | None
    start: Int[Array, ""] | int
    tapped_layers: Mapping[str, int]
    kept: Bool[Array, "L B"] | None = None

    def __call__(
        self,
        run: LayerRun,
        index: Int[Array, ""] | int,
        weights: dict[str, Any],
        carry: LayerCarry,
    ) -> LayerCarry:
        """Run layer `index`, which is one of `run`, and return the carry after it."""
        config, x = self.layer.config, carry.x
        carry = carry.replace(
            layer_inputs={
                name: jnp.where(index == self.tapped_layers[name], x, before)
                for name, before in carry.layer_inputs.items()
            }
        )
        if run.mixer != "absent":
            mix = self._attention if run.mixer == "attention" else self._recurrence
            carry = mix(index, weights, carry)
        after, chosen = carry.x, None
        if run.mlp:
            after, chosen = self.layer.add_mlp(after, weights)
        if self.kept is not None:
            after = jnp.where(self.kept[index][:, None, None], after, x)
        experts = carry.experts
        if experts is not None and chosen is not None:
            sparse = [layer for one in config.runs if one.sparse for layer in one.layers]
            experts = experts.at[among(tuple(sorted(sparse)), index)].set(chosen)
        return carry.replace(x=after, experts=experts)

    def _attention(
        self, index: Int[Array, ""] | int, weights: dict[str, Any], carry: LayerCarry
    ) -> LayerCarry:
        """Return the carry after the attention of layer `index`."""
        layer, x = self.layer, carry.x
        view, number = self.views(index), among(layer.config.layers_with("attention"), index)
        h = layer.normed_input(x, weights, "attention_norm")
        copies = 1 if carry.window is None else carry.window.k.shape[2] // layer.config.num_kv_heads
        query, key, value, gate = layer.heads(h, weights["attention"], view.rotation, copies)
        mixed, window = self._attend(number, view, carry.window, query, key, value)
        queries = carry.queries
        if queries is not None:
            queries = queries.at[:, :, number].set(ungroup(query, x.shape[1]))
        x = layer.add_attention(x, mixed, weights, gate)
        return carry.replace(x=x, window=window, queries=queries)

    def _recurrence(
        self, index: Int[Array, ""] | int, weights: dict[str, Any], carry: LayerCarry
    ) -> LayerCarry:
        """Return the carry after the recurrent part of layer `index`."""
        layer, window = self.layer, carry.window
        recurrent = RecurrentLayer(layer)
        batch, tokens = carry.x.shape[:2]
        number = among(layer.config.layers_with("recurrent"), index)
        sizes, stored = (recurrent.recurrence, 1, batch), (layer.dtype, layer.shards)
        state, own = empty_state(*sizes, *stored), empty_window(*sizes, tokens, *stored)
        if self.cache is not None:
            state = stack_of_one(self.cache.recurrent, number)
        if window is not None:
            own = stack_of_one(window.recurrent, number)
        h = layer.normed_input(carry.x, weights, "attention_norm")
        pass_of_layer = RecurrentPass(state, own, self.start, self.ancestors)
        out, own = recurrent(h, weights["recurrence"], pass_of_layer)
        if window is not None:
            put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=number, axis=0)
            window = window.replace(recurrent=jax.tree.map(put, window.recurrent, own))
        x = layer.add_to_residual(carry.x, out, weights, "after_attention_norm")
        return carry.replace(x=x, window=window)

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


def among(layers: tuple[int, ...], index: Int[Array, ""] | int) -> Int[Array, ""] | int:
    """Return the position of layer `index` in `layers`, ascending indices."""
    if layers[-1] == len(layers) - 1:
        return index
    if isinstance(index, int):
        return layers.index(index)
    return jnp.searchsorted(jnp.asarray(layers, jnp.int32), index).astype(jnp.int32)


def stack_of_one(stacked: Any, index: Int[Array, ""] | int) -> Any:
    """Return the entry at `index` of arrays that are stacked on their first axis, as a stack."""
    return jax.tree.map(
        lambda array: lax.dynamic_slice_in_dim(array, index, 1, allow_negative_indices=False),
        stacked,
    )


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
