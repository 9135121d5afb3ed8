"""Choice of the layers that draft, by measured acceptance and the share of a pass that they cost.

The target reads a short text, one layer at a time. What a draft's layers would predict after each
of its tokens is compared with the target's most likely token. Which middle layers matter least is
found by the dynamic program of CLaSp (Chen et al. 2505.24196).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.causal_mask import causal
from specjax.core.parameter_sizes import count_bytes, is_quantized
from specjax.loading.model import Model
from specjax.models.decoder import Decoder
from specjax.theory import speedup

TEXT = """The town library opens at nine. On Mondays a group of retired engineers meets there to \
repair clocks, and anyone who brings one may stay and watch.

Q: How many days are there in two weeks?
A: There are seven days in a week, so two weeks have 2 x 7 = 14 days.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

To make tea, boil fresh water, pour it over the leaves, and wait for three to five minutes. Then \
remove the leaves, and add milk or lemon if you like."""
"""The text on which acceptance is measured."""
_LENGTH = 128


class Choice(NamedTuple):
    """The best of several options to draft with, and the draft length at which it is best.

    `acceptance` is the probability that a draft token is accepted, `cost` what it costs in passes
    of the target, and `speedup` the estimate over plain decoding (`specjax.theory.speedup`).
    """

    index: int
    length: int
    acceptance: float
    cost: float
    speedup: float

    def __str__(self) -> str:
        """Return the measurements and the estimate as a sentence without its end."""
        pays = "" if self.speedup > 1 else ", so that plain decoding is faster"
        return (
            f"{self.acceptance:.0%} of draft tokens were the target's, and each costs "
            f"{self.cost:.2f} of a pass: an estimated {self.speedup:.2f}x at "
            f"{self.length} draft token{'s' if self.length > 1 else ''}{pays}"
        )


class LeftOut(NamedTuple):
    """Layers that are left out, ascending, and the acceptance of a draft token without them."""

    layers: tuple[int, ...]
    acceptance: float


def choose(acceptance: Sequence[float], costs: Sequence[float], longest: int) -> Choice:
    """Return the option with the greatest speed-up at its best length, 1 to `longest` tokens.

    The options have one acceptance and one cost each. Of equal ones it is the first.
    """
    lengths = np.arange(1, max(longest, 1) + 1)
    rates, shares = (np.asarray(values, np.float64)[:, None] for values in (acceptance, costs))
    gains = speedup(rates, lengths, shares)
    index, length = np.unravel_index(np.argmax(gains), gains.shape)
    best = float(rates[index, 0]), float(shares[index, 0]), float(gains[index, length])
    return Choice(int(index), int(lengths[length]), *best)


def draft_cost(target: Model, layers: int) -> float:
    """Return the share of the weights of a pass that `layers` layers and the head have."""
    each = sum(map(count_bytes, _layer_params(target.params).values())) / target.config.num_layers
    head = count_bytes(target.params["head"])
    return (layers * each + head) / (target.config.num_layers * each + head)


def exit_acceptance(target: Model) -> list[float]:
    """Return the share of a text's tokens where each early exit predicts what the target does.

    Entry i is that of the exit after i + 1 layers; the last layer has none. The text is `TEXT`, or
    for a model without a tokenizer as many random tokens.
    """
    reader = _Reader(target)
    states, choices = reader.embedded(), []
    for layer in range(target.config.num_layers):
        states = reader.run(layer, states)
        choices.append(reader.choices(states[0]))
    return [float((choice == choices[-1]).mean()) for choice in choices[:-1]]


def leave_out(target: Model, most: int) -> list[LeftOut]:
    """Return for 1 to `most` layers which of them to leave out, and the acceptance without them.

    After each layer, and for each number of layers left out so far, the dynamic program keeps the
    choice whose states are most similar (by cosine) to the target's own. A token attends to the
    target's keys of earlier tokens, as the first token of a draft does.
    """
    reader, count = _Reader(target), target.config.num_layers
    states = jnp.repeat(reader.embedded(), most + 1, axis=0)
    chosen: list[tuple[int, ...]] = [()] * (most + 1)
    for layer in range(count):
        kept = reader.run(layer, states)
        passed = jnp.roll(states, 1, axis=0)
        similar = np.stack([_similarity(new, kept[0]) for new in (kept, passed)])
        number = np.arange(most + 1)
        # So many layers can have been left out only if there were as many.
        similar[:, number > layer + 1] = -np.inf
        similar[0, number > layer] = similar[1, 0] = -np.inf
        leaves = similar[1] > similar[0]
        states = jnp.where(leaves[:, None, None], passed, kept)
        chosen = [
            (*chosen[at - 1], layer) if leave else chosen[at] for at, leave in enumerate(leaves)
        ]
    own = reader.choices(states[0])
    return [
        LeftOut(layers, float((reader.choices(rows) == own).mean()))
        for layers, rows in zip(chosen[1:], states[1:], strict=True)
    ]


class _Reader:
    """The passes of a target over the text, a layer at a time."""

    def __init__(self, target: Model) -> None:
        config = target.config
        self._decoder, self._params = target.architecture, target.params
        self._layers = _layer_params(target.params)
        self._others = {
            name: leaf for name, leaf in target.params.items() if name not in self._layers
        }
        length = min(_LENGTH, config.max_positions)
        if target.tokenizer is None:
            tokens = np.random.default_rng(0).integers(0, config.vocab_size, length)
        else:
            tokens = target.tokenizer.encode(TEXT)[:length]
        self._tokens = jnp.asarray(tokens, jnp.int32)[None]

    def embedded(self) -> Float[Array, "1 T D"]:
        """Return the inputs of the first layer."""
        return _embedded(self._decoder, self._params, self._tokens)

    def run(self, layer: int, states: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        """Return the states after a layer; keys of earlier tokens are those of row 0."""
        decoder, params = self._one_layer(layer)
        return _run_layer(decoder, params, self._tokens, states)

    def choices(self, states: Float[Array, "T D"]) -> Int[np.ndarray, "T"]:
        """Return the most likely token after each token, from the states after some layer."""
        return np.asarray(_choices(self._decoder, self._params, self._tokens, states[None])[0])

    def _one_layer(self, layer: int) -> tuple[Decoder, dict[str, Any]]:
        """Return a decoder of a single layer, equal for layers of equal structure; its weights."""
        config, form = self._decoder.config, self._decoder.form
        run = next(run for run in config.runs if layer in run.layers)
        experts = replace(config.experts, num_dense=0) if run.sparse else None
        if form.stacked:
            at = run.layers.index(layer)
            weights = jax.tree.map(
                lambda leaf: leaf.layers(at, at + 1) if is_quantized(leaf) else leaf[at : at + 1],
                self._layers[run.name],
                is_leaf=is_quantized,
            )
        else:
            weights = {"0": self._layers["layers"][str(layer)]}
        one = replace(config.some_layers((layer,)), experts=experts)
        decoder = replace(
            self._decoder,
            config=one,
            form=replace(form, layers="stacked" if form.stacked else "unrolled"),
        )
        return decoder, {**self._others, one.runs[0].name if form.stacked else "layers": weights}


def _layer_params(params: dict[str, Any]) -> dict[str, Any]:
    return {name: leaves for name, leaves in params.items() if name.endswith("layers")}


@functools.partial(jax.jit, static_argnums=0)
def _embedded(decoder: Decoder, params: Any, tokens: Int[Array, "1 T"]) -> Float[Array, "1 T D"]:
    return _pass(decoder, params, tokens, num_layers=0).features["pre_norm"]


@functools.partial(jax.jit, static_argnums=0)
def _choices(
    decoder: Decoder, params: Any, tokens: Int[Array, "1 T"], states: Float[Array, "1 T D"]
) -> Int[Array, "1 T"]:
    last = decoder.config.num_layers
    options = {"states": states, "first_layer": last, "num_layers": last, "logits": True}
    return jnp.argmax(_pass(decoder, params, tokens, **options).logits, axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    decoder: Decoder, params: Any, tokens: Int[Array, "1 T"], states: Float[Array, "R T D"]
) -> Float[Array, "R T D"]:
    """Return the states of R rows after the layer of a decoder with one.

    Each token attends to the keys of earlier tokens in row 0, and to its own.
    """
    rows, count = len(states), tokens.shape[1]
    window = _pass(decoder, params, tokens, states=states[:1]).window
    window = window.padded(count).take(jnp.zeros(rows, jnp.int32))
    earlier = jnp.tril(jnp.ones((count, count), bool), -1)
    visible = jnp.concatenate([earlier, jnp.eye(count, dtype=bool)], axis=1)[None]
    result = decoder.extend(
        params,
        jnp.repeat(tokens, rows, axis=0),
        jnp.broadcast_to(jnp.arange(count), (rows, count)),
        None,
        window,
        count,
        visible,
        features=("pre_norm",),
        logits=False,
        states=states,
    )
    return result.features["pre_norm"]


def _pass(decoder: Decoder, params: Any, tokens: Int[Array, "1 T"], **options: Any) -> Any:
    """Return the extension of a pass over the text, without logits unless requested."""
    count = tokens.shape[1]
    return decoder.extend(
        params,
        tokens,
        jnp.arange(count)[None],
        None,
        decoder.make_window(1, count),
        0,
        causal(jnp.arange(count), count),
        **{"features": ("pre_norm",), "logits": False} | options,
    )


@jax.jit
def _similarity(states: Float[Array, "R T D"], own: Float[Array, "T D"]) -> Float[Array, "R"]:
    """Return the cosine of the states of each row and the target's own, mean over tokens."""

    def unit(rows: Array) -> Array:
        rows = rows.astype(jnp.float32)
        return rows / jnp.maximum(jnp.linalg.norm(rows, axis=-1, keepdims=True), 1e-9)

    return (unit(states) * unit(own)[None]).sum(axis=-1).mean(axis=-1)
