"""A mixture of experts: routing of tokens to experts, and the weighted sum of their outputs.

No token is dropped (Gale et al. 2211.15841). The routers are Mixtral's (2401.04088), a softmax over
all experts, and DeepSeek-V3's (2412.19437), sigmoids with groups and a selection bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.models.config import Experts
from specjax.models.layers.matmul import full_precision, product
from specjax.models.layers.quantized import QuantizedKernel

_TILE = 64
"""The number of an expert's tokens that are multiplied at a time."""

Gated = Callable[[Float[Array, "*N F2"]], Float[Array, "*N F"]]
"""The activation of an MLP from its joined gate and up (`DecoderLayer.gated`)."""


class Routes(NamedTuple):
    """The K experts that each of N tokens uses, and the weights of their outputs in float32.

    `shared` is the weight of the shared MLP, or None for 1.
    """

    experts: Int[Array, "N K"]
    weights: Float[Array, "N K"]
    shared: Float[Array, "N 1"] | None = None


class StackedExperts(NamedTuple):
    """The kernels and biases of all experts of some layers, and the index of the layer to use.

    The index is applied together with that of the expert, so that no program copies a layer's
    experts.
    """

    gate_up: Float[Array, "L E D F2"] | QuantizedKernel
    down: Float[Array, "L E F D"] | QuantizedKernel
    layer: Int[Array, ""] | int
    gate_up_bias: Float[Array, "L E F2"] | None = None
    down_bias: Float[Array, "L E D"] | None = None

    def with_bias(
        self, gate_up: Float[Array, "N F2"], expert: Int[Array, "*N"]
    ) -> Float[Array, "N F2"]:
        """Return the joined gate and up of some tokens, plus the bias, if any, of `expert`.

        That is the expert of all tokens, or of each. It is clipped where it is out of range.
        """
        if self.gate_up_bias is None:
            return gate_up
        bias = self.gate_up_bias.at[self.layer, expert].get(mode="clip")
        return gate_up + bias.astype(gate_up.dtype).reshape(-1, gate_up.shape[1])

    def kernel(self, name: str, expert: Int[Array, ""]) -> Float[Array, "I O"] | QuantizedKernel:
        """Return the kernel called `name` ("gate_up" or "down") of the expert `expert`."""
        leaf = getattr(self, name)
        if isinstance(leaf, QuantizedKernel):
            count = leaf.shape[1]
            return leaf.with_one_stack().at_layer(self.layer * count + expert)
        where = (self.layer, expert, 0, 0)
        return lax.dynamic_slice(leaf, where, (1, 1, *leaf.shape[2:]))[0, 0]


def route(h: Float[Array, "N D"], router: dict[str, Any], config: Experts) -> Routes:
    """Return the experts that the router selects for each of N tokens, and their weights.

    `h` are the inputs of the layer's experts, and `router` the parameters of the router. Of experts
    with equal scores, the one with the lower index is selected.
    """
    logits = product("nd,de->ne", h, router["kernel"], out=jnp.float32)
    if config.bias:
        logits = logits + router["bias"].astype(jnp.float32)[None, :]
    scores = jax.nn.sigmoid(logits) if config.router == "sigmoid" else jax.nn.softmax(logits)
    choice = scores
    if config.selection_bias:
        choice = choice + router["selection_bias"].astype(jnp.float32)[None, :]
    if config.groups > 1:
        choice = _best_groups(choice, config)
    _, experts = lax.top_k(lax.stop_gradient(choice), config.per_token)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.normalize:
        # Sigmoids may all be zero.
        least = 1e-20 if config.router == "sigmoid" else 0.0
        weights = weights / (weights.sum(axis=1, keepdims=True) + least)
    return Routes(experts, weights * config.scale)


def weigh_shared(h: Float[Array, "N D"], gate: Float[Array, "1 D"]) -> Float[Array, "N 1"]:
    """Return the weight of the shared MLP for each of N tokens, given its gate."""
    return jax.nn.sigmoid(product("nd,de->ne", h, gate.T, out=jnp.float32))


def _best_groups(choice: Float[Array, "N E"], config: Experts) -> Float[Array, "N E"]:
    """Return the scores, with -inf for experts outside each token's best groups."""
    grouped = choice.reshape(len(choice), config.groups, -1)
    of_groups = lax.top_k(grouped, config.group_scores)[0].sum(axis=-1)
    _, best = lax.top_k(of_groups, config.groups_per_token)
    kept = jax.nn.one_hot(best, config.groups, dtype=bool).any(axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def mix(
    h: Float[Array, "N D"],
    routes: Routes,
    stacked: StackedExperts,
    gated: Gated,
    gated_shared: Gated | None = None,
    multiply: Any = None,
    differentiable: bool = False,
    grouped: bool = False,
    shared: dict[str, Any] | None = None,
) -> Float[Array, "N D"]:
    """Return the weighted sum of each token's experts and of the `shared` MLP if any, in float32.

    `routes` are the experts of each token of `h`, and `stacked` has their kernels; biases of the
    down projection are not added (`mixed_biases`). `gated` and
    `gated_shared` are the activations of the experts and of the shared MLP; products round their
    operands to `multiply`. The tokens of each expert are gathered, and only experts with tokens are
    read, so that for a few tokens the bytes read are proportional to the distinct experts. Experts
    out of range add nothing. `differentiable` (training, since a loop of unknown length has no
    gradient) uses grouped products over all experts, which CPUs compute as masked products.
    `grouped` uses a GPU kernel instead of a loop, which would wait for each iteration, unless
    kernels are quantized or their widths are not divisible by 16.
    """
    if grouped and not differentiable and _fit_kernel(stacked):
        total = _sum_by_kernel(h, routes, stacked, gated, multiply)
    else:
        total = _sum(h, routes, stacked, gated, multiply, differentiable)
    if shared is None:
        return total
    assert gated_shared is not None
    times = functools.partial(product, "nd,df->nf", multiply=multiply)
    hidden = gated_shared(times(h, shared["gate_up"]["kernel"]))
    of_shared = times(hidden, shared["down"]["kernel"], out=jnp.float32)
    return total + (of_shared if routes.shared is None else of_shared * routes.shared)


def _sum(
    h: Float[Array, "N D"],
    routes: Routes,
    stacked: StackedExperts,
    gated: Gated,
    multiply: Any,
    differentiable: bool,
) -> Float[Array, "N D"]:
    """Return the weighted sum of each token's experts; the arguments are those of `mix`."""
    count, (num_tokens, per_token) = stacked.down.shape[1], routes.experts.shape
    expert_of_route = routes.experts.reshape(-1)
    in_range = (expert_of_route >= 0) & (expert_of_route < count)
    expert_of_route = jnp.where(in_range, expert_of_route, count)
    order = jnp.argsort(expert_of_route, stable=True)
    sizes = jnp.zeros(count, jnp.int32).at[expert_of_route].add(1, mode="drop")
    token, weight = order // per_token, routes.weights.reshape(-1)[order]

    if differentiable:
        kernels = [leaf[stacked.layer] for leaf in stacked[:2]]

        def hidden(gate_up: Float[Array, "M F2"]) -> Float[Array, "M F"]:
            return gated(stacked.with_bias(gate_up, expert_of_route[order]))

        rows = _grouped(h[token], kernels, sizes, hidden, multiply) * weight[:, None]
        is_routed = jnp.arange(len(token)) < sizes.sum()
        rows = jnp.where(is_routed[:, None], rows, 0)
        return jnp.zeros(h.shape, jnp.float32).at[token].add(rows)

    tile = min(_TILE, num_tokens)
    ends = jnp.cumsum(sizes)
    tiles = -(-sizes // tile)
    tile_ends = jnp.cumsum(tiles)
    # Entries of a tile beyond its expert's tokens get an index out of range, and are dropped.
    token = jnp.pad(token, (0, tile), constant_values=num_tokens)
    weight = jnp.pad(weight, (0, tile))
    within = jnp.arange(tile)

    def step(index: Int[Array, ""], total: Float[Array, "N D"]) -> Float[Array, "N D"]:
        expert = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
        first = ends[expert] - sizes[expert] + (index - tile_ends[expert] + tiles[expert]) * tile
        of_expert = first + within < ends[expert]
        rows = jnp.where(of_expert, lax.dynamic_slice_in_dim(token, first, tile), num_tokens)
        scale = jnp.where(of_expert, lax.dynamic_slice_in_dim(weight, first, tile), 0)
        x = jnp.take(h, rows, axis=0, mode="fill", fill_value=0)

        def times(x: jax.Array, name: str) -> jax.Array:
            return product("nd,df->nf", x, stacked.kernel(name, expert), multiply=multiply)

        gate_up = stacked.with_bias(times(x, "gate_up"), expert)
        out = times(gated(gate_up), "down").astype(jnp.float32)
        return total.at[rows].add(out * scale[:, None], mode="drop")

    return lax.fori_loop(0, tile_ends[-1], step, jnp.zeros(h.shape, jnp.float32))


def _fit_kernel(stacked: StackedExperts) -> bool:
    """Return whether the GPU kernel supports the kernels of some experts."""
    # Pallas takes half a second to import, and no CPU needs it.
    from specjax.models.layers import expert_product

    leaves = stacked.gate_up, stacked.down
    is_float = not any(isinstance(leaf, QuantizedKernel) for leaf in leaves)
    return is_float and all(expert_product.takes(*leaf.shape[2:]) for leaf in leaves)


def _sum_by_kernel(
    h: Float[Array, "N D"],
    routes: Routes,
    stacked: StackedExperts,
    gated: Gated,
    multiply: Any,
) -> Float[Array, "N D"]:
    """Return the weighted sum of each token's experts, by one GPU kernel for each of the products.

    The arguments are those of `mix`.
    """
    from specjax.models.layers import expert_product

    count = stacked.down.shape[1]
    tiles = expert_product.arrange(routes.experts, count)
    dtype = h.dtype if multiply is None else multiply

    def times(x: jax.Array, kernel: jax.Array, *, gather: bool = False) -> jax.Array:
        return expert_product.multiply(x.astype(dtype), tiles, kernel, stacked.layer, gather=gather)

    gate_up = times(h, stacked.gate_up, gather=True).astype(h.dtype)
    of_row = jnp.repeat(tiles.expert, len(tiles.token) // len(tiles.expert))
    hidden = gated(stacked.with_bias(gate_up, of_row))
    out = times(hidden, stacked.down)[tiles.row].astype(h.dtype).astype(jnp.float32)
    in_range = (routes.experts >= 0) & (routes.experts < count)
    return (out * jnp.where(in_range, routes.weights, 0)[:, :, None]).sum(axis=1)


def mixed_biases(routes: Routes, stacked: StackedExperts) -> Float[Array, "N D"]:
    """Return the weighted sum of the biases of each token's experts after the down projection."""
    assert stacked.down_bias is not None
    biases = stacked.down_bias[stacked.layer, routes.experts].astype(jnp.float32)
    return (biases * routes.weights[:, :, None]).sum(axis=1)


def _grouped(
    x: Float[Array, "M D"],
    kernels: list[jax.Array],
    sizes: Int[Array, " E"],
    gated: Gated,
    multiply: Any,
) -> Float[Array, "M D"]:
    """Return the output of each row's expert, by one grouped product per kernel.

    Rows are sorted by expert, and `sizes` has the number of rows of each.
    """
    gate_up, down = kernels
    dtype = x.dtype if multiply is None else multiply

    def times(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.ragged_dot(
            x.astype(dtype),
            kernel.astype(dtype),
            sizes,
            precision=full_precision(dtype),
            preferred_element_type=jnp.float32,
        )

    return times(gated(times(x, gate_up)), down)
