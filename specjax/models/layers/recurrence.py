"""Recurrent layers over a window of tokens: a short convolution, and linear attention.

A token's state is its parent's, advanced by the token. What it reads of its ancestors is a sum over
them, so that one pass computes all slots of a tree, and reads the committed state once.

Linear attention is the gated delta rule (Yang et al. 2412.06464) or Mamba-2 (Dao and Gu
2405.21060): S_t = a_t S_parent + k_t u_t^T, y_t = S_t^T q_t. In Mamba-2 u_t is given. In the delta
rule it is b_t (v_t - a_t S_parent^T k_t), which is a triangular system over a token's ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.recurrent_state import RecurrentState, RecurrentWindow
from specjax.distributed.sharding import constrain
from specjax.models.config import DecoderConfig, Recurrence
from specjax.models.layers.decoder_layer import DecoderLayer
from specjax.models.layers.norm import rms_norm

_BLOCK = 32
"""The number of tokens whose states are computed at once; memory grows with its product with W."""
_NORM_EPSILON = 1e-6
"""Added to the square of the lengths of queries and keys in the delta rule."""


class Ancestors(NamedTuple):
    """What the tokens of a pass see of a window: themselves and their ancestors.

    `visible` marks these slots. `taps` are the entries that each of K taps of a convolution reads,
    the token's own one last, among the K - 1 committed inputs and then the window's slots.
    """

    visible: Bool[Array, "#B T W"]
    taps: Int[Array, "#B T K"]

    @classmethod
    def of(cls, visible: Bool[Array, "#B T W"], conv_width: int) -> Ancestors:
        """Return what tokens see, given the slots that are visible to them.

        A token's ancestors come before it, in the order of their depth.
        """
        committed = jnp.ones((*visible.shape[:2], conv_width - 1), bool)
        seen = jnp.concatenate([committed, visible], axis=2)
        # The number of seen entries after each: 0 at the token itself, 1 at its parent.
        later = lax.cumsum(seen.astype(jnp.int32), axis=2, reverse=True) - seen
        taps = [
            jnp.argmax(seen & (later == distance), axis=2)
            for distance in reversed(range(conv_width))
        ]
        return cls(visible, jnp.stack(taps, axis=2))


class RecurrentPass(NamedTuple):
    """A pass over T tokens through one layer: its committed state, and the window that they fill.

    State and window are a stack of one layer; the tokens fill the slots from `start` on.
    """

    state: RecurrentState
    window: RecurrentWindow
    start: Int[Array, ""] | int
    ancestors: Ancestors


ByHead = tuple[Float[Array, "B T H P"], RecurrentWindow]
"""The results of the heads for each token, before the output projection, and the same window."""
Mixed = tuple[Float[Array, "B T D"], RecurrentWindow]
"""The result of a layer for each token, and the window with what the tokens add to its state."""


def empty_state(
    recurrence: Recurrence, layers: int, batch: int, dtype: Any, shards: int
) -> RecurrentState:
    """Return the state of `layers` recurrent layers before the first token of each row.

    Of a mesh with `shards` devices for the weights, each has the state of its own heads.
    """
    shards = recurrence.shards(shards)
    inputs = recurrence.groups(shards), recurrence.channels(shards)
    rows, taps = (layers, batch), recurrence.conv_width - 1
    empty = _sharded(jnp.zeros((*rows, taps, *inputs), dtype), 3, shards)
    if not recurrence.has_matrix:
        return RecurrentState(empty, None)
    sizes = recurrence.value_heads, recurrence.key_width, recurrence.value_width
    return RecurrentState(empty, _sharded(jnp.zeros((*rows, *sizes), jnp.float32), 2, shards))


def empty_window(
    recurrence: Recurrence, layers: int, batch: int, slots: int, dtype: Any, shards: int
) -> RecurrentWindow:
    """Return a window of W = `slots` slots for `layers` recurrent layers, all zero.

    It is sharded like `empty_state`.
    """
    shards = recurrence.shards(shards)
    groups, heads = recurrence.groups(shards), recurrence.value_heads

    def zeros(*sizes: int, dtype: Any = jnp.float32) -> jax.Array:
        return _sharded(jnp.zeros((layers, batch, slots, *sizes), dtype), 3, shards)

    inputs = zeros(groups, recurrence.channels(shards), dtype=dtype)
    if not recurrence.has_matrix:
        return RecurrentWindow(inputs, None, None, None)
    return RecurrentWindow(
        inputs,
        zeros(groups, recurrence.key_width),
        zeros(heads, recurrence.value_width),
        zeros(heads),
    )


def _sharded(array: Float[Array, "M B ..."], axis: int, shards: int) -> Float[Array, "M B ..."]:
    """Return an array of M layers, constrained to be sharded by rows and, on `axis`, by heads."""
    of_heads = ["heads" if number == axis and shards > 1 else None for number in range(array.ndim)]
    return constrain(array, None, "batch", *of_heads[2:])


@dataclass(frozen=True)
class RecurrentLayer:
    """The arithmetic of the recurrent part of a layer, whose other parts are those of `layer`."""

    layer: DecoderLayer

    @property
    def config(self) -> DecoderConfig:
        """The config of the decoder."""
        return self.layer.config

    @property
    def recurrence(self) -> Recurrence:
        """The config of recurrent layers."""
        recurrence = self.config.recurrence
        assert recurrence is not None
        return recurrence

    @property
    def epsilon(self) -> float:
        """The epsilon of the norm of results."""
        own = self.recurrence.norm_epsilon
        return self.config.rms_norm_eps if own is None else own

    @property
    def shards(self) -> int:
        """The number of devices over which the layer is sharded, 1 if each has all of it."""
        return self.recurrence.shards(self.layer.shards)

    def __call__(
        self, h: Float[Array, "B T D"], weights: dict[str, Any], tokens: RecurrentPass
    ) -> Mixed:
        """Return the result for inputs `h`; `weights` are the parameters of the recurrence."""
        run = {"delta": self._delta, "mamba2": self._mamba2, "conv": self._convolution}
        y, window = run[self.recurrence.kind](h, weights, tokens)
        y = y.astype(h.dtype).reshape(*h.shape[:2], -1)
        return self.layer.project("btn,nd->btd", y, weights["output"]), window

    def _convolution(
        self, h: Float[Array, "B T D"], weights: dict[str, Any], tokens: RecurrentPass
    ) -> ByHead:
        """Return a gated convolution (LFM2): one gate before it, and one after."""
        heads, width = self.recurrence.value_heads, self.recurrence.value_width
        blocks = self._projected(h, weights["before_after_value"], heads)
        before, after, x = jnp.split(blocks, 3, axis=3)
        parts, tokens = self._convolved({"value": before * x}, weights, tokens)
        return after * parts["value"].reshape(*h.shape[:2], heads, width), tokens.window

    def _delta(
        self, h: Float[Array, "B T D"], weights: dict[str, Any], tokens: RecurrentPass
    ) -> ByHead:
        """Return the gated delta rule, as Qwen3-Next has it: results are normed, then gated."""
        recurrence, shape = self.recurrence, h.shape[:2]
        groups, width = recurrence.key_heads, recurrence.key_width
        heads, value_width = recurrence.value_heads, recurrence.value_width
        shared = heads // groups
        blocks = self._projected(h, weights["qkvz"], groups)
        ends = [width, 2 * width, 2 * width + shared * value_width]
        query, key, value, gate = jnp.split(blocks, ends, axis=3)
        parts = {"query": query, "key": key, "value": value}
        parts, tokens = self._convolved(parts, weights, tokens)
        query, key, value = (nn.silu(part).astype(jnp.float32) for part in parts.values())
        rates = self._projected(h, weights["rates"], groups, jnp.float32)
        share = nn.sigmoid(rates[..., :shared]).reshape(*shape, heads) * (1 + recurrence.doubled)
        decays = self._log_decays(rates[..., shared:].reshape(*shape, heads), weights)[0]
        y, window = linear_attention(
            _unit(query) * width**-0.5,
            _unit(key),
            value.reshape(*shape, heads, value_width),
            decays,
            share,
            tokens,
        )
        y = rms_norm(y, weights["norm"]["scale"].astype(jnp.float32), self.epsilon)
        gate = gate.reshape(*shape, heads, value_width).astype(jnp.float32)
        return y * nn.silu(gate), window

    def _mamba2(
        self, h: Float[Array, "B T D"], weights: dict[str, Any], tokens: RecurrentPass
    ) -> ByHead:
        """Return Mamba-2: results are gated, then normed by groups of heads that share keys."""
        recurrence, shape = self.recurrence, h.shape[:2]
        heads, width = recurrence.value_heads, recurrence.value_width
        blocks = self._projected(h, weights["value_gate_decay"], heads)
        value, gate, rates = jnp.split(blocks, [width, 2 * width], axis=3)
        blocks = self._projected(h, weights["query_key"], recurrence.key_heads)
        query, key = jnp.split(blocks, 2, axis=3)
        parts = {"query": query, "key": key, "value": value}
        parts, tokens = self._convolved(parts, weights, tokens)
        query, key, value = (nn.silu(part).astype(jnp.float32) for part in parts.values())
        value = value.reshape(*shape, heads, width)
        decays, steps = self._log_decays(rates[..., 0].astype(jnp.float32), weights)
        y, window = linear_attention(query, key, value * steps[..., None], decays, None, tokens)
        y = y + value * weights["skip"].astype(jnp.float32)[None, None, :, None]
        y = y * nn.silu(gate.astype(jnp.float32))
        # By head first: where devices share a norm, they exchange one number of each group.
        squares = jnp.sum(y * y, axis=3).reshape(*shape, recurrence.key_heads, -1)
        mean = jnp.sum(squares, axis=3) * (recurrence.key_heads / (heads * width))
        norm = lax.rsqrt(mean + self.epsilon)
        scale = weights["norm"]["scale"].astype(jnp.float32).reshape(heads, width)
        norm = jnp.repeat(norm, heads // recurrence.key_heads, axis=2)
        return y * norm[..., None] * scale[None, None], window

    def _projected(
        self, h: Float[Array, "B T D"], weights: dict[str, Any], blocks: int, out: Any = None
    ) -> Float[Array, "B T N C"]:
        """Return the product with a joined kernel by its N = `blocks`, in the dtype `out`."""
        y = self.layer.project("btd,dn->btn", h, weights, out)
        return lax.optimization_barrier(y).reshape(*h.shape[:2], blocks, -1)

    def _log_decays(
        self, rates: Float[Array, "B T H"], weights: dict[str, Any]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Return each token's log decays, and the steps (softplus of `rates`) that they come from.

        A step decays the matrix by exp(-exp(log_rate) step).
        """
        bias, log_rate = (weights[name].astype(jnp.float32)[None, None] for name in _RATES)
        steps = jnp.clip(nn.softplus(rates + bias), *self.recurrence.step_limits)
        return -jnp.exp(log_rate) * steps, steps

    def _convolved(
        self,
        parts: dict[str, Float[Array, "B T _ _"]],
        weights: dict[str, Any],
        tokens: RecurrentPass,
    ) -> tuple[dict[str, Float[Array, "B T G _"]], RecurrentPass]:
        """Return `parts` after the convolution along each token's ancestors, and the pass with it.

        The parts, by name, have queries, keys and values by head; the results have them by group.
        """
        x = self._by_group(
            {name: part.reshape(*part.shape[:2], -1) for name, part in parts.items()}
        )
        window = tokens.window
        window = window.replace(inputs=_write(window.inputs, x, tokens.start))
        entries = jnp.concatenate([tokens.state.inputs[0], window.inputs[0]], axis=1)
        taps = {name: weights["taps"][name][:, 0].T[None] for name in parts}
        taps = self._by_group(taps)[0].astype(x.dtype)
        index = jnp.broadcast_to(tokens.ancestors.taps, (*x.shape[:2], len(taps)))
        y = sum(
            jnp.take_along_axis(entries, index[:, :, tap, None, None], axis=1)
            * taps[None, None, tap]
            for tap in range(len(taps))
        )
        if "taps_bias" in weights:
            bias = {name: weights["taps_bias"][name][None, None] for name in parts}
            y = y + self._by_group(bias).astype(y.dtype)
        ends = np.cumsum([self.recurrence.key_width] * (len(parts) - 1))
        split = dict(zip(parts, jnp.split(y, ends, axis=3), strict=True))
        return split, tokens._replace(window=window)

    def _by_group(self, parts: dict[str, Float[Array, "*N T _"]]) -> Float[Array, "*N T G X"]:
        """Return the channels of each group side by side, given those of all queries, keys, values.

        Where key heads are repeated for the devices of a mesh, so are their channels.
        """
        groups, joined = self.recurrence.groups(self.shards), []
        for name, part in parts.items():
            heads = groups if name == "value" else self.recurrence.key_heads
            by_head = part.reshape(*part.shape[:-1], heads, -1)
            joined.append(_repeated(by_head, groups // heads))
        return jnp.concatenate(joined, axis=-1)


_RATES = ("rate_bias", "log_rate")


def _unit(x: Float[Array, "*N C"]) -> Float[Array, "*N C"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPSILON)


def _repeated(heads: Float[Array, "*N G C"], copies: int) -> Float[Array, "*N R C"]:
    return heads if copies == 1 else jnp.repeat(heads, copies, axis=-2)


def _write(into: jax.Array, new: jax.Array, start: Int[Array, ""] | int) -> jax.Array:
    """Return a layer's entries of a window, a stack of one, with `new` at slots from `start` on."""
    where = (0, 0, start, *(0 for _ in new.shape[2:]))
    return lax.dynamic_update_slice(
        into, new[None].astype(into.dtype), where, allow_negative_indices=False
    )


def linear_attention(
    query: Float[Array, "B T G N"],
    key: Float[Array, "B T G N"],
    value: Float[Array, "B T H P"],
    log_decays: Float[Array, "B T H"],
    share: Float[Array, "B T H"] | None,
    tokens: RecurrentPass,
) -> tuple[Float[Array, "B T H P"], RecurrentWindow]:
    """Return what each token reads from its state, and the window with the T tokens in it.

    With `share` (b) it is the delta rule, otherwise values are added as they are. Tokens are taken
    in blocks, each of which reads the slots of those before it.
    """
    count, start, window = query.shape[1], tokens.start, tokens.window
    window = window.replace(
        keys=_write(window.keys, key, start),
        log_decays=_write(window.log_decays, log_decays, start),
    )
    matrix, visible = tokens.state.matrix[0], tokens.ancestors.visible
    if count <= _BLOCK:
        return _attend_block(query, key, value, share, matrix, window, start, visible)
    # Padded at the end, so that the last block fits; the tokens there see nothing.
    blocks = -(-count // _BLOCK)
    slots, spare = window.keys.shape[2], blocks * _BLOCK - count
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, spare)))

    def blocked(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, [(0, spare if axis == 1 else 0) for axis in range(array.ndim)])
        array = array.reshape(len(array), blocks, _BLOCK, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    def step(carry: tuple[Any, Any], of_block: Any) -> tuple[tuple[Any, Any], jax.Array]:
        first, window = carry
        *arrays, visible = of_block
        y, window = _attend_block(*arrays, matrix, window, first, visible)
        return (first + _BLOCK, window), y

    operands = jax.tree.map(blocked, (query, key, value, share, visible))
    carry = jnp.asarray(start, jnp.int32), window.padded(spare)
    (_, window), y = lax.scan(step, carry, operands)
    y = jnp.moveaxis(y, 0, 1).reshape(len(value), -1, *value.shape[2:])[:, :count]
    # The padding has no values, and later slots keep theirs.
    before, after = tokens.window.values, window.values[:, :, :slots]
    ours = jnp.arange(slots)[None, None, :, None, None] < start + count
    window = window.at_slots(slice(slots))
    return y, window.replace(values=jnp.where(ours, after, before))


def _attend_block(
    query: Float[Array, "B T G N"],
    key: Float[Array, "B T G N"],
    value: Float[Array, "B T H P"],
    share: Float[Array, "B T H"] | None,
    matrix: Float[Array, "B H N P"],
    window: RecurrentWindow,
    start: Int[Array, ""] | int,
    visible: Bool[Array, "#B T W"],
) -> tuple[Float[Array, "B T H P"], RecurrentWindow]:
    """Return `linear_attention` of a few tokens, whose keys and decays the window already has."""
    batch, tokens = key.shape[:2]
    groups = key.shape[2], value.shape[2] // key.shape[2]
    seen = visible[:, :, :, None]
    # The decay from each slot to a token is that of the token and its ancestors after the slot.
    until = lax.cumsum(jnp.where(seen, window.log_decays[0][:, None], 0.0), axis=2, reverse=True)
    after = jnp.pad(until[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    decay = _grouped(jnp.where(seen, jnp.exp(after), 0.0), groups)
    from_state = _grouped(jnp.exp(until[:, :, 0]), groups)[..., None]
    # Queries, and keys where they read too, share one pass over the state and the slots.
    readers = query if share is None else jnp.concatenate([query, key], axis=1)
    # By heads, so that the state is read as it is laid out.
    of_heads = jnp.repeat(readers, groups[1], axis=2)
    of_state = jnp.einsum("bthn,bhnp->bthp", of_heads, matrix, precision="highest")
    of_state = _grouped(of_state, groups, 1)
    of_slots = jnp.einsum("btgn,bwgn->btwg", readers, window.keys[0], precision="highest")
    if share is not None:
        shares = _grouped(share, groups)
        value = _grouped(value, groups, 1) - from_state * of_state[:, tokens:]
        weights = of_slots[:, tokens:, :, :, None] * decay
        if not (isinstance(start, int) and start == 0):
            earlier = jnp.arange(weights.shape[2])[None, :, None, None] < start
            known = jnp.where(earlier, window.values[0], 0.0)
            value = value - _mixed(weights, _grouped(known, groups, 1))
        among = lax.dynamic_slice_in_dim(weights, start, tokens, axis=2)
        value = _solved(among * shares[:, :, None], value * shares[..., None])
    window = window.replace(
        values=_write(window.values, value.reshape(batch, tokens, -1, value.shape[-1]), start)
    )
    weights = of_slots[:, :tokens, :, :, None] * decay
    y = from_state * of_state[:, :tokens] + _mixed(weights, _grouped(window.values[0], groups, 1))
    return y.reshape(batch, tokens, -1, y.shape[-1]), window


def _grouped(array: jax.Array, groups: tuple[int, int], rest: int = 0) -> jax.Array:
    """Return `array` with its axis of heads, before `rest` others, as axes of groups and heads."""
    axis = array.ndim - 1 - rest
    return array.reshape(*array.shape[:axis], *groups, *array.shape[axis + 1 :])


def _mixed(
    weights: Float[Array, "B T W G R"], values: Float[Array, "B W G R P"]
) -> Float[Array, "B T G R P"]:
    return jnp.einsum("btwgr,bwgrp->btgrp", weights, values, precision="highest")


def _solved(
    weights: Float[Array, "B T T G R"], right: Float[Array, "B T G R P"]
) -> Float[Array, "B T G R P"]:
    """Return the solution u of u_t + sum of weights_ts u_s over the s before t = right_t."""
    tokens = right.shape[1]
    if tokens == 1:
        return right
    lower = jnp.moveaxis(weights, (1, 2), (3, 4))
    solved = lax.linalg.triangular_solve(
        lower,
        jnp.moveaxis(right, 1, 3),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    return jnp.moveaxis(solved, 3, 1)
