"""The arithmetic of a decoder layer except attention: norms, projections, rotation, MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from specjax.distributed.sharding import constrain
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import gate_up_block
from specjax.models.layers import experts
from specjax.models.layers.attention import Partial, group_queries, ungroup, with_sinks
from specjax.models.layers.experts_on_mesh import mix_on_mesh
from specjax.models.layers.matmul import ChosenKernel, product
from specjax.models.layers.norm import layer_norm, rms_norm
from specjax.models.layers.quantized import QuantizedKernel
from specjax.models.layers.rope import attention_factor, frequencies

Rotation = tuple[Float[Array, "B T 1 R2"], Float[Array, "B T 1 R2"]]
_LATENT_EPSILON = 1e-6
"""The epsilon of the norms of latents, whatever that of the model is."""
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "gelu": functools.partial(nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(nn.relu(x)),
    "gelu_sigmoid": lambda x: x * nn.sigmoid(1.702 * x),
}


class Heads(NamedTuple):
    """The queries of a layer, grouped by the key head that they share, and its keys and values.

    `gate` is what its result is gated by, in models that do so.
    """

    query: Float[Array, "B G X C"]
    key: Float[Array, "B T G C"]
    value: Float[Array, "B T G C"]
    gate: Float[Array, "B T HC"] | None = None


_Projected = tuple[
    Float[Array, "B T H C"],
    Float[Array, "B T G C"],
    Float[Array, "B T G C"],
    Float[Array, "B T HC"] | None,
]
"""Queries by head, keys, values and the gate of a layer."""


@dataclass(frozen=True)
class DecoderLayer:
    """The arithmetic of one layer of a decoder or of a trained head.

    Activations have the dtype `dtype`; products round their operands to `multiply`, by default
    `dtype`. `shards` is the number of devices over which weights are sharded. `differentiable`
    allows gradients of experts, and `grouped_experts` uses a GPU kernel for them. The methods take
    a layer's parameters, or those of one of its modules, as nested dicts with the names in
    `models.parameter_table`.
    """

    config: DecoderConfig
    dtype: jnp.dtype
    shards: int = 1
    multiply: jnp.dtype | None = None
    differentiable: bool = False
    grouped_experts: bool = False

    def norm(self, x: Float[Array, "B T D"], weights: dict[str, Any]) -> Float[Array, "B T D"]:
        """Return `x` normed with `weights`, by an RMS norm or a layer norm as the config says."""
        if self.config.norm.kind == "layer":
            return layer_norm(x, weights["scale"], weights["bias"], self.config.rms_norm_eps)
        return self.rms_norm(x, weights["scale"])

    def normed_input(
        self, x: Float[Array, "B T D"], weights: dict[str, Any], name: str
    ) -> Float[Array, "B T D"]:
        """Return the input of attention or MLP: `x`, normed by `name` if the layer has that norm.

        `weights` are the layer's.
        """
        return self.norm(x, weights[name]) if name in weights else x

    def rms_norm(self, x: jax.Array, scale: Float[Array, "D"]) -> jax.Array:
        """Return the RMS norm of `x` over the last axis, with the config's epsilon and offset."""
        if self.config.norm.offset:
            # Added in float32, since 1 + scale has too few bits in the weights' dtype.
            wide = scale.astype(jnp.float32) + self.config.norm.offset
            return rms_norm(x.astype(jnp.float32), wide, self.config.rms_norm_eps).astype(x.dtype)
        return rms_norm(x, scale, self.config.rms_norm_eps)

    def project(
        self, equation: str, x: jax.Array, weights: dict[str, Any], out: Any = None
    ) -> jax.Array:
        """Return the einsum `equation` of `x` and a kernel, plus the bias if there is one.

        `weights` has the kernel [in, out] and the bias; `out` is the dtype of the result.
        """
        y = product(equation, x, weights["kernel"], multiply=self.multiply, out=out)
        if "bias" not in weights:
            return y
        return y + jnp.expand_dims(weights["bias"].astype(y.dtype), (0, 1))

    def heads(
        self,
        h: Float[Array, "B T Din"],
        attention: dict[str, Any],
        rotation: Rotation | None,
        copies: int,
    ) -> Heads:
        """Return the queries, the keys and the values of `h`.

        Queries are grouped by the key head that they share. `attention` has the parameters of the
        projection, `rotation` are the cosines and sines of the positions, and each key and value
        head is repeated `copies` times.
        """
        config = self.config
        if config.attention.latent is not None:
            query, key, value, gate = self._latent_heads(h, attention, rotation)
        else:
            query, key, value, gate = self._projected_heads(h, attention, rotation)
        key, value = (self._split(_copied(heads, copies), "kv_heads") for heads in (key, value))
        query = self._split(query, "heads")
        query = group_queries(query, key.shape[2], config.attention.query_scale)
        return Heads(query, key, value, gate)

    def _projected_heads(
        self, h: Float[Array, "B T Din"], attention: dict[str, Any], rotation: Rotation | None
    ) -> _Projected:
        """Return queries, keys, values and gates, computed by one product; see `heads`."""
        config, (batch, tokens) = self.config, h.shape[:2]
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        y = self.project("btd,dn->btn", h, attention["qkv"])
        if kv_heads % self.shards:
            # A device's part does not consist of whole heads.
            y = self.whole(y)
        blocks = _as_multiplied(y).reshape(batch, tokens, kv_heads, -1, width)
        query, gate = blocks[:, :, :, :-2], None
        if config.attention.gated:
            query, gate = query[:, :, :, ::2], query[:, :, :, 1::2]
            gate = gate.reshape(batch, tokens, -1)
        query = query.reshape(batch, tokens, heads, width)
        key, value = blocks[:, :, :, -2], blocks[:, :, :, -1]
        if config.attention.qk_norm:
            query, key = self._normed_heads(query, key, attention["qk_norm"]["scale"])
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        return query, key, value, gate

    def _latent_heads(
        self, h: Float[Array, "B T Din"], attention: dict[str, Any], rotation: Rotation | None
    ) -> _Projected:
        """Return queries, keys and values of latent attention; see `heads`.

        Of each head's dimensions the rotated ones come first, and last in the projections.
        """
        config, latent = self.config, self.config.attention.latent
        assert latent is not None
        assert rotation is not None
        rest = config.head_dim - config.rotary_width

        def of_heads(x: jax.Array, name: str) -> Float[Array, "B T H N"]:
            y = _as_multiplied(self.project("btd,dn->btn", x, attention[name]))
            return y.reshape(*y.shape[:2], config.num_heads, -1)

        def normed(x: jax.Array, name: str) -> jax.Array:
            return rms_norm(x, attention[name]["scale"], _LATENT_EPSILON)

        def rotated(x: jax.Array) -> jax.Array:
            if latent.paired:
                x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
            return rotate(x, *rotation)

        if latent.query_rank is None:
            query = of_heads(h, "query")
        else:
            low = self.whole(self.project("btd,dn->btn", h, attention["query_down"]))
            query = of_heads(normed(low, "query_latent_norm"), "query_up")
        low = self.whole(self.project("btd,dn->btn", h, attention["kv_down"]))
        both = of_heads(normed(low[..., : latent.kv_rank], "kv_latent_norm"), "kv_up")
        shared = rotated(low[:, :, None, latent.kv_rank :])
        shared = jnp.broadcast_to(shared, (*both.shape[:3], config.rotary_width))
        query = jnp.concatenate([rotated(query[..., rest:]), query[..., :rest]], axis=-1)
        key = jnp.concatenate([shared, both[..., :rest]], axis=-1)
        padding = ((0, 0), (0, 0), (0, 0), (0, config.head_dim - latent.value_dim))
        return query, key, jnp.pad(both[..., rest:], padding), None

    def _normed_heads(
        self,
        query: Float[Array, "B T H C"],
        key: Float[Array, "B T G C"],
        scale: Float[Array, " N"],
    ) -> tuple[Float[Array, "B T H C"], Float[Array, "B T G C"]]:
        """Return queries and keys after their norms, whose scales are joined in `scale`."""
        width = self.config.head_dim
        if self.config.attention.qk_norm_over == "head":
            query_scale, key_scale = scale.reshape(2, width)
            return self.rms_norm(query, query_scale), self.rms_norm(key, key_scale)
        scales = scale.reshape(self.config.num_kv_heads, -1, width)

        def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
            joined = x.reshape(*x.shape[:2], -1)
            return self.rms_norm(joined, scale.reshape(-1)).reshape(x.shape)

        return normed(query, scales[:, :-1]), normed(key, scales[:, -1])

    def add_attention(
        self,
        x: Float[Array, "B T D"],
        mixed: Partial,
        weights: dict[str, Any],
        gate: Float[Array, "B T HC"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Return the residual stream `x` plus the output projection of attention's result `mixed`.

        The result is first multiplied by the sigmoids of `gate`, if there is one. The summand is
        normed and scaled first if the config says so.
        """
        attention = weights["attention"]
        if "sinks" in attention:
            mixed = with_sinks(mixed, attention["sinks"])
        out = ungroup(mixed.weighted / mixed.denominator, x.shape[1]).astype(x.dtype)
        if (latent := self.config.attention.latent) is not None:
            out = out[..., : latent.value_dim]
        out = out.reshape(*x.shape[:2], -1)
        if gate is not None:
            out = out * nn.sigmoid(gate)
        out = self.project("btn,nd->btd", out, attention["output"])
        return self.add_to_residual(x, out, weights, "after_attention_norm")

    def add_mlp(
        self, x: Float[Array, "B T D"], weights: dict[str, Any]
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"] | None]:
        """Return the residual stream `x` plus the result of the MLP or experts, and the experts.

        The second result has the K experts of each token; it is None for an MLP. `weights` are the
        layer's.
        """
        h, mlp, chosen = self.normed_input(x, weights, "mlp_norm"), weights["mlp"], None
        if "experts" in mlp:
            out, chosen = self.experts(h, mlp)
        else:
            out = self.mlp(h, mlp)
        return self.add_to_residual(x, out, weights, "after_mlp_norm"), chosen

    def add_to_residual(
        self,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T D"],
        weights: dict[str, Any],
        name: str,
    ) -> Float[Array, "B T D"]:
        """Return `x` plus `out`, normed by `name` if the layer has it, and scaled as configured."""
        if name in weights:
            out = self.norm(out, weights[name])
        if self.config.residual_scale != 1.0:
            out = (out.astype(jnp.float32) * self.config.residual_scale).astype(out.dtype)
        return self.whole(x + out)

    def mlp(self, h: Float[Array, "B T D"], mlp: dict[str, Any]) -> Float[Array, "B T D"]:
        """Return the result of an MLP on `h`, with or without a gate as the config says."""
        if self.config.mlp.gated:
            gate_up = self.project("btd,df->btf", h, mlp["gate_up"])
            hidden = self.gated(self.config.intermediate_size)(gate_up)
        else:
            activation = ACTIVATIONS[self.config.mlp.activation]
            hidden = activation(self.project("btd,df->btf", h, mlp["up"]))
        return self.project("btf,fd->btd", hidden, mlp["down"])

    def gated(self, width: int) -> Callable[[jax.Array], jax.Array]:
        """Return the activation of an MLP of width F = `width`, as a function of gate and up.

        It maps their joined outputs [..., 2 F], or the part of them that a device of a mesh holds,
        to [..., F].
        """
        mlp = self.config.mlp
        activation = ACTIVATIONS[mlp.activation]
        block = gate_up_block(self.config.num_heads, width)

        def hidden(gate_up: Float[Array, "*N F2"]) -> Float[Array, "*N F"]:
            blocks = _as_multiplied(gate_up).reshape(*gate_up.shape[:-1], -1, 2, block)
            gate, up = blocks[..., 0, :], blocks[..., 1, :]
            if mlp.limit is not None:
                gate, up = jnp.minimum(gate, mlp.limit), jnp.clip(up, -mlp.limit, mlp.limit)
            if mlp.offset:
                up = up + mlp.offset
            return (activation(gate) * up).reshape(*gate_up.shape[:-1], -1)

        return hidden

    def experts(
        self, h: Float[Array, "B T D"], mlp: dict[str, Any]
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"]]:
        """Return the sum of each token's experts and of the shared MLP, and the experts' ids."""
        config = self.config.experts
        assert config is not None
        flat = h.reshape(-1, h.shape[-1])
        routes = experts.route(flat, mlp["router"], config)
        if config.shared_gate:
            routes = routes._replace(shared=experts.weigh_shared(flat, mlp["shared_gate"]))
        mix = functools.partial(
            experts.mix,
            gated=self.gated(config.intermediate_size),
            gated_shared=self.gated(config.shared_size) if config.shared_size else None,
            multiply=self.multiply,
            differentiable=self.differentiable,
            grouped=self.grouped_experts,
        )
        stacked = mlp["experts"]
        out = mix_on_mesh(mix, flat, routes, stacked, mlp.get("shared"), self.shards)
        if stacked.down_bias is not None:
            out = out + experts.mixed_biases(routes, stacked).astype(out.dtype)
        out = out.reshape(h.shape)
        return out, routes.experts.reshape(*h.shape[:2], -1)

    def whole(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the residual stream with the constraint that it is not sharded over `model`."""
        return constrain(x, "batch", None, None)

    def _split(self, x: Float[Array, "B T N C"], heads: str) -> Float[Array, "B T N C"]:
        return constrain(x, "batch", None, heads if self.shards > 1 else None, None)


def _as_multiplied(y: Float[Array, "*N F"]) -> Float[Array, "*N F"]:
    """Return the result of a product, before its outputs are split into blocks.

    The layout of the blocks would otherwise reach the kernel through the product: on TPUs XLA then
    writes out all layers' kernels in another layout at every call.
    """
    return lax.optimization_barrier(y)


def at_layer(
    stacked: Shaped[Array, "L ..."] | QuantizedKernel, index: Int[Array, ""] | int
) -> jax.Array | QuantizedKernel:
    """Return the entry of layer `index`, which is not negative, of an array stacked over layers."""
    if isinstance(stacked, QuantizedKernel):
        return stacked.at_layer(index)
    if isinstance(index, int):
        return stacked[index]
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False, allow_negative_indices=False)


def one_layer(layers: dict[str, Any], index: Int[Array, ""] | int) -> dict[str, Any]:
    """Return the weights of layer `index`, given the weights of all layers as stacked arrays.

    Experts stay stacked, in a value that includes the index (`StackedExperts`).
    """
    if "experts" not in layers.get("mlp", {}):
        return _at_layer(layers, index)
    kernels = layers["mlp"]["experts"]
    dense_parts = {name: leaves for name, leaves in layers["mlp"].items() if name != "experts"}
    layer = _at_layer({**layers, "mlp": dense_parts}, index)
    return {**layer, "mlp": {**layer["mlp"], "experts": _stacked(kernels, index)}}


def _at_layer(layers: dict[str, Any], index: Int[Array, ""] | int) -> dict[str, Any]:
    return jax.tree.map(
        lambda leaf: at_layer(leaf, index),
        layers,
        is_leaf=lambda node: isinstance(node, QuantizedKernel),
    )


def layer_chooser(
    layers: Sequence[dict[str, Any]],
) -> Callable[[Int[Array, ""]], dict[str, Any]]:
    """Return a function that selects one of several separate layers by a traced index.

    Kernels are not copied (`ChosenKernel`); all else, which is small, is stacked.
    """

    def of_leaf(path: Any, *leaves: jax.Array) -> Callable[[Int[Array, ""]], Any]:
        if path[-1].key == "kernel":
            return functools.partial(ChosenKernel, leaves)
        return functools.partial(at_layer, jnp.stack(leaves))

    choosers = jax.tree_util.tree_map_with_path(of_leaf, *layers)

    return lambda index: jax.tree.map(lambda choose: choose(index), choosers)


def with_experts(layer: dict[str, Any]) -> dict[str, Any]:
    """Return a layer with its experts, if it has any, in the form of a stack of one layer."""
    if "experts" not in layer.get("mlp", {}):
        return layer
    kernels = jax.tree.map(
        lambda leaf: leaf.as_stack() if isinstance(leaf, QuantizedKernel) else leaf[None],
        layer["mlp"]["experts"],
        is_leaf=lambda node: isinstance(node, QuantizedKernel),
    )
    return {**layer, "mlp": {**layer["mlp"], "experts": _stacked(kernels, 0)}}


def _stacked(kernels: dict[str, Any], index: Int[Array, ""] | int) -> experts.StackedExperts:
    gate_up, down = kernels["gate_up"], kernels["down"]
    biases = gate_up.get("bias"), down.get("bias")
    return experts.StackedExperts(gate_up["kernel"], down["kernel"], index, *biases)


def embed(
    params: dict[str, Any], tokens: Int[Array, "B T"], dtype: jnp.dtype
) -> Float[Array, "B T D"]:
    """Return the embeddings of tokens: rows of the embedding table, or columns of a tied head."""
    if "embed" in params:
        table = params["embed"]["embedding"]
        is_quantized = isinstance(table, QuantizedKernel)
        x = table.columns(tokens) if is_quantized else jnp.take(table, tokens, axis=0)
    else:
        kernel = params["head"]["kernel"]
        if isinstance(kernel, QuantizedKernel):
            x = kernel.columns(tokens)
        else:
            x = jnp.moveaxis(jnp.take(kernel, tokens, axis=1), 0, -1)
    return x.astype(dtype)


def final_logits(products: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return logits, given the products with the output head, divided and limited as configured."""
    x, softcap = products, config.logit_softcap
    if config.logit_divisor != 1.0:
        x = x / config.logit_divisor
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def rotate_by(
    positions: Int[Array, "B T"], config: DecoderConfig, windowed: bool = False
) -> Rotation | None:
    """Return the cosine and sine of each rotation angle, by position and pair of dimensions.

    Both are multiplied by the attention factor. Returns None if the config has no rotation.
    `windowed` selects layers with a sliding window.
    """
    if not config.rotary_width:
        return None
    pairs = frequencies(config, windowed)
    angles = positions[:, :, None].astype(jnp.float32) * pairs[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    factor = attention_factor(config, windowed)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(
    x: Float[Array, "B T N C"], cos: Float[Array, "B T 1 R2"], sin: Float[Array, "B T 1 R2"]
) -> Float[Array, "B T N C"]:
    """Return `x` with each pair (i, i + R/2) of a head, i < R/2, rotated, in float32.

    `cos` and `sin` are those of the pairs' angles.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _copied(heads: Float[Array, "B T G C"], copies: int) -> Float[Array, "B T N C"]:
    return heads if copies == 1 else jnp.repeat(heads, copies, axis=2)
