"""Draft heads that read pairs of a token and a hidden state: the base of EAGLE and MTP modules.

A head has D modules of one decoder layer each. At position t, module k (0-based) reads the pair of
token x_{t+1+k} and a hidden state: the target's feature f_t for module 0, the output of module k -
1 at t for the others. Its output predicts x_{t+k+2}. Pairs at further positions, whose hidden
states are the last module's own outputs, predict further tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.cache import KVCache, Window
from specjax.models.config import DecoderConfig, SlidingWindow
from specjax.models.decoder import Decoder, attention
from specjax.models.form import DEFAULT_FORM, Form
from specjax.models.layers.attention import Partial
from specjax.models.layers.decoder_layer import DecoderLayer, Heads, rotate_by, with_experts
from specjax.models.layers.layer_pass import write_window
from specjax.models.layers.local_and_global_layers import recent_keys
from specjax.models.parameters import ParameterTable


@runtime_checkable
class PairConfig(Protocol):
    """The config of a head; `decoder` describes the layer of each module."""

    @property
    def decoder(self) -> DecoderConfig:
        """The config of each module's layer, with the target's vocabulary (V)."""

    @property
    def draft_vocab_size(self) -> int:
        """The number of logits (Vd)."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that module 0 reads."""

    @property
    def target_hidden_size(self) -> int:
        """The width of the target's features (Dt)."""

    @property
    def num_modules(self) -> int:
        """The number of modules (D)."""

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the head's parameters, as a nested dict of `Parameter`.

        It is laid out as in `models.parameter_table`.
        """


@dataclass(frozen=True)
class PairHead:
    """A head as pure functions of its parameters; hashable.

    `params` has the head's own parameters, and under "shared" the target's arrays (`share`). The
    functions from `inputs` to `extend` take the parameters of one module (`module`). `shards` is
    the number of devices over which keys and values are sharded, and `multiply` the dtype to which
    products round their operands, as in `Decoder`. `differentiable` allows gradients of experts.
    `form` selects the attention over the head's caches, which store entries in `cache_dtype`
    (`Decoder`). With a `sliding_window`, pairs attend only to the pairs in it.
    """

    config: PairConfig
    dtype: jnp.dtype
    multiply: jnp.dtype | None = None
    shards: int = 1
    differentiable: bool = False
    form: Form = DEFAULT_FORM
    cache_dtype: jnp.dtype | None = None
    sliding_window: SlidingWindow | None = None

    @property
    def arithmetic(self) -> DecoderLayer:
        """The arithmetic of the head's layers."""
        return DecoderLayer(
            *(self.config.decoder, self.dtype, self.shards, self.multiply, self.differentiable),
            grouped_experts=self.form.cache_attention == "kernel",
        )

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Return random parameters, boxed with the logical names of their axes."""
        return ParameterTable(self.config.parameter_table(), self.dtype).init(key)["params"]

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of one module [1, B, G, S, C]."""
        return self._decoder.make_cache(batch, capacity)

    def make_window(self, batch: int, slots: int) -> Window:
        """Return an empty window of one module [1, B, G, W, C]."""
        return self._decoder.make_window(batch, slots)

    def module(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        """Return the parameters of module `index`, with the shared ones under "shared"."""
        raise NotImplementedError

    def fuse(
        self, params: dict[str, Any], features: dict[str, Float[Array, "B T Dt"]]
    ) -> Float[Array, "B T D"]:
        """Return the hidden states that module 0 reads, from the target's features of `taps`."""
        raise NotImplementedError

    def inputs(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T Din"]]:
        """Return the residual stream and attention's input for pairs of a token and a hidden state.

        `params` are those of one module, and `positions` the positions of the pairs.
        """
        raise NotImplementedError

    def heads(
        self,
        params: dict[str, Any],
        attended: Float[Array, "B T Din"],
        positions: Int[Array, "B T"],
    ) -> Heads:
        """Return queries, keys and values, rotated by `positions`, given attention's input.

        Queries are grouped by the key head that they share.
        """
        rotation = rotate_by(positions, self.config.decoder)
        copies = self._decoder.cached_heads // self.config.decoder.num_kv_heads
        return self.arithmetic.heads(attended, self._layer(params)["attention"], rotation, copies)

    def finish(
        self,
        params: dict[str, Any],
        residual: Float[Array, "B T D"],
        mixed: Partial,
        gate: Float[Array, "B T HC"] | None,
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"] | None]:
        """Add the attention result, gated by that of `heads`, to the residual; run the MLP.

        Returns the layer's output, and each token's experts if the layer has experts.
        """
        layer = self._layer(params)
        x = self.arithmetic.add_attention(residual, mixed, layer, gate)
        return self.arithmetic.add_mlp(x, layer)

    def next_hidden(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Return the input of the next module or draft step, from the layer's output."""
        raise NotImplementedError

    def logits(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T Vd"]:
        """Return draft logits in float32 from the layer's outputs."""
        states, kernel = self.readout(params, output), self.logit_kernel(params)
        return self.arithmetic.project("btd,dv->btv", states, {"kernel": kernel}, jnp.float32)

    def readout(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Return the layer's outputs after the final norm, which `logit_kernel` projects."""
        return self.arithmetic.norm(output, params["final_norm"])

    def logit_kernel(self, params: dict[str, Any]) -> Float[Array, "D Vd"]:
        """Return the matrix that maps the result of `readout` to draft logits."""
        raise NotImplementedError

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
        """Run a module over T pairs; return its outputs, and the window with those pairs written.

        The pairs fill slots start..start+T of the window and attend to those that `visible` allows.
        With `only`, each row returns the outputs of the pairs at its indices (one if it is a
        number; without it Q = T); keys and values of all pairs are written, as those of `layer`.
        """
        residual, attended = self.inputs(params, tokens, hidden, positions)
        query, key, value, gate = self.heads(params, attended, positions)
        key, value = cache.rounded(key), cache.rounded(value)
        window = window.replace(
            k=write_window(window.k, key, layer, start),
            v=write_window(window.v, value, layer, start),
        )
        if window.positions is not None:
            written = lax.dynamic_update_slice(window.positions, positions, (0, start))
            window = window.replace(positions=written)
        if only is not None:
            only = only.reshape(len(only), -1)
            visible = jnp.broadcast_to(visible, (len(only), *visible.shape[1:]))
            residual, positions, visible, gate = jax.tree.map(
                lambda array: jnp.take_along_axis(
                    array, only.reshape(*only.shape, *[1] * (array.ndim - 2)), axis=1
                ),
                (residual, positions, visible, gate),
            )
            of_pairs = query.reshape(*query.shape[:2], tokens.shape[1], -1, query.shape[-1])
            chosen = jnp.take_along_axis(of_pairs, only[:, None, :, None, None], axis=2)
            query = chosen.reshape(*query.shape[:2], -1, query.shape[-1])
        decoder = self._decoder
        repeats, limits = decoder.config.num_heads // decoder.cached_heads, {}
        if self.sliding_window is not None:
            visible, oldest = recent_keys(self.sliding_window, positions, window.positions, visible)
            limits = {"oldest": jnp.repeat(oldest, repeats, axis=1)}
        seen = jnp.repeat(visible, repeats, axis=1)[:, None]
        attend = attention(self.form, decoder.config, cache, positions.shape[1], self.shards > 1)
        mixed = attend(query, cache, window, layer, seen, **limits)
        output, _ = self.finish(params, residual, mixed, gate)
        return output, window

    @property
    def _decoder(self) -> Decoder:
        """A decoder that consists of the module's layer, used to lay out keys and values."""
        config = replace(self.config.decoder, sliding_window=self.sliding_window)
        return Decoder(config, self.dtype, self.shards, cache_dtype=self.cache_dtype)

    def _layer(self, params: dict[str, Any]) -> dict[str, Any]:
        # Without the barrier, as in the decoder, XLA may split the heads again.
        return with_experts(lax.optimization_barrier(params["layer"]))
