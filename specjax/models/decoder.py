"""The decoder: one forward pass, `extend`, for prefill, drafting, verification and training.

It is Llama (Touvron et al. 2302.13971) with grouped queries (Ainslie et al. 2305.13245), rotary
positions (Su et al. 2104.09864), RMS norms (Zhang and Sennrich 1910.07467) and gated SiLU (Shazeer
2002.05202), and the variants of other families that `DecoderConfig` describes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.cache import KVCache, Window, make_cache
from specjax.core.cached_entries import Entries
from specjax.core.in_place import apply_if
from specjax.core.language_model import Extension
from specjax.core.top_tokens import (
    top_tokens,
    top_tokens_of_states,
)
from specjax.distributed.sharding import constrain
from specjax.models.config import DecoderConfig, LayerRun
from specjax.models.features import EXPERTS, LAYER_INPUTS, QUERIES, Features
from specjax.models.form import DEFAULT_FORM, Form
from specjax.models.layers import cpu_attention
from specjax.models.layers.attention import (
    Partial,
    attend,
    attend_cache,
    attend_rows,
    cached_blocks,
)
from specjax.models.layers.decoder_layer import (
    DecoderLayer,
    at_layer,
    embed,
    final_logits,
    layer_chooser,
    one_layer,
    with_experts,
)
from specjax.models.layers.layer_pass import LayerCarry, LayerPass, among
from specjax.models.layers.local_and_global_layers import layer_views
from specjax.models.layers.recurrence import Ancestors, empty_state, empty_window
from specjax.models.parameter_table import parameter_table
from specjax.models.parameters import ParameterTable, checked

IMPOSSIBLE = -1e30
"""The logit of a token that is never produced: finite, so that 0 times it is 0 in a loss."""


def unused_mask(config: DecoderConfig) -> Bool[np.ndarray, "V"]:
    """Return a mask of the ids without a token in the tokenizer."""
    mask = np.zeros(config.vocab_size, np.bool_)
    mask[list(config.unused_tokens)] = True
    return mask


@dataclass(frozen=True)
class Decoder:
    """A decoder as plain functions of its parameters; implements `interface.LanguageModel`.

    `shards` is the number of devices over which its weights are sharded (the mesh's `model` axis),
    1 if they are replicated. With more shards than key/value heads, heads are repeated in the cache
    so that each shard has a copy. `multiply` is the dtype to which products round their operands,
    if other than `dtype` (training, and bfloat16 on a CPU: `matmul.product`); attention may then
    round as the device does by default. `cache_dtype` is the storage of keys and values in caches,
    by default `dtype` (`cached_entries`). Layers in `skipped` do not run, and their entries of a
    window stay empty.
    """

    config: DecoderConfig
    dtype: jnp.dtype
    shards: int = 1
    form: Form = DEFAULT_FORM
    multiply: jnp.dtype | None = None
    cache_dtype: jnp.dtype | None = None
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.form.check(self.config)

    @property
    def vocab_size(self) -> int:
        """The number of tokens (V)."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest supported sequence, in tokens."""
        return self.config.max_positions

    @property
    def cached_heads(self) -> int:
        """The number of key/value heads in caches and windows (G), at least one per shard."""
        return max(self.config.num_kv_heads, self.shards)

    @property
    def arithmetic(self) -> DecoderLayer:
        """The arithmetic of one layer of this decoder."""
        return DecoderLayer(
            *(self.config, self.dtype, self.shards, self.multiply),
            grouped_experts=self.form.cache_attention == "kernel",
        )

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache [L, B, G, S, C]; of recurrent layers it has the state instead."""
        config = self.config
        cache = make_cache(
            len(config.layers_with("attention")),
            batch,
            self.cached_heads,
            capacity,
            config.head_dim,
            self.cache_dtype or self.dtype,
        )
        return cache.replace(
            k=self.constrain_heads(cache.k),
            v=self.constrain_heads(cache.v),
            length=constrain(cache.length, "batch"),
            recurrent=self._recurrent(empty_state, batch),
        )

    def make_window(self, batch: int, slots: int) -> Window:
        """Return an empty window [L, B, G, W, C], with the slots of recurrent layers if any."""
        config = self.config
        layers = len(config.layers_with("attention"))
        shape = (layers, batch, self.cached_heads, slots, config.head_dim)
        empty = self.constrain_heads(jnp.zeros(shape, self.dtype))
        positions = None
        if config.sliding_window is not None:
            positions = constrain(jnp.zeros((batch, slots), jnp.int32), "batch", None)
        return Window(empty, empty, positions, self._recurrent(empty_window, batch, slots))

    def _recurrent(self, make: Callable[..., Any], batch: int, *sizes: int) -> Any:
        """Return `make(...)`, a state or a window of recurrent layers; None if there are none."""
        if self.config.recurrence is None:
            return None
        layers = len(self.config.layers_with("recurrent"))
        return make(self.config.recurrence, layers, batch, *sizes, self.dtype, self.shards)

    def constrain_heads(self, entries: Entries) -> Entries:
        """Return keys or values [L, B, G, S, C], constrained to be sharded by head on a mesh."""
        axes = (None, "batch", "kv_heads" if self.shards > 1 else None, None, None)
        return jax.tree.map(lambda array: constrain(array, *axes), entries)

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Return random parameters, each in a Flax box that has the logical names of its axes."""
        table = parameter_table(self.config, self.form.stacked)
        module = ParameterTable(table, self.dtype)
        return module.init(key)["params"]

    def extend(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None,
        window: Window | None,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        *,
        features: tuple[str, ...] = (),
        logits: bool = True,
        num_layers: int | None = None,
        first_layer: int = 0,
        states: Float[Array, "B T D"] | None = None,
        kept: Bool[Array, "L B"] | None = None,
    ) -> Extension:
        """Run T tokens through the model, as specified by `LanguageModel.extend`.

        Where `kept` is False, a row leaves a layer out: its input becomes its output (layer
        dropout). In training the feature `layer_inputs` is the inputs of all layers [L, B, T, D].
        Raises InputError for parameters that are missing or have the wrong shape, and for features
        of layers before `first_layer`.
        """
        requested = Features(features, self.config, first_layer)
        params = checked(parameter_table(self.config, self.form.stacked), params)
        if window is not None and window.positions is not None:
            window_positions = lax.dynamic_update_slice(window.positions, positions, (0, start))
            window = window.replace(positions=window_positions)
        x = self._embed(params, tokens, positions) if states is None else states
        attend_all = None
        if cache is not None:
            attend_all = attention(self.form, self.config, cache, tokens.shape[1], self.shards > 1)
        run_layer = LayerPass(
            layer=replace(self.arithmetic, differentiable=window is None),
            views=layer_views(
                self.config,
                positions,
                window,
                visible,
                self.config.num_heads // self._heads_of(window),
            ),
            ancestors=self.config.recurrence
            and Ancestors.of(visible, self.config.recurrence.conv_width),
            cache=cache,
            attend_all=attend_all,
            start=start,
            tapped_layers=requested.tapped_layers,
            kept=kept,
        )
        carry = LayerCarry(
            x,
            window,
            layer_inputs={name: jnp.zeros_like(x) for name in requested.tapped_layers},
            experts=requested.no_experts(tokens.shape),
            queries=requested.no_queries(tokens.shape, self.dtype),
        )
        depth = self.config.num_layers if num_layers is None else num_layers
        inputs = [] if LAYER_INPUTS in features else None
        carry = self._run_layers(params, run_layer, carry, first_layer, depth, inputs)
        result = self._outputs(params, carry, requested, logits=logits)
        if inputs is not None:
            result.features[LAYER_INPUTS] = jnp.concatenate(inputs)
        return result

    def _heads_of(self, window: Window | None) -> int:
        """Return the number of key/value heads, from `window` or, without one, from the config."""
        return self.config.num_kv_heads if window is None else window.k.shape[2]

    def _embed(
        self, params: dict[str, Any], tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Return the input of the first layer."""
        embedding = self.config.embedding
        x = self.arithmetic.whole(embed(params, tokens, self.dtype))
        if embedding.scale != 1.0:
            x = x * jnp.asarray(embedding.scale, x.dtype)
        if embedding.positions:
            learned = jnp.take(params["positions"]["embedding"], positions, axis=0, mode="clip")
            x = x + learned.astype(x.dtype)
        return x

    def _run_layers(
        self,
        params: dict[str, Any],
        run_layer: LayerPass,
        carry: LayerCarry,
        start: int,
        depth: int,
        inputs: list[Float[Array, "layers B T D"]] | None,
    ) -> LayerCarry:
        """Run layers `start` to `depth` - 1 and return the carry after them.

        If `inputs` is a list, what each layer reads is appended to it.
        """
        if self.form.layers == "unrolled":
            # Layers of the same structure are traced and lowered once.
            traced = {run: jax.jit(functools.partial(run_layer, run)) for run in self.config.runs}
            run_of = {layer: run for run in traced for layer in run.layers}
            for index in self._not_skipped(start, depth):
                # Without the barrier XLA splits the heads again, and transposes kernels for T = 1.
                weights = with_experts(lax.optimization_barrier(params["layers"][str(index)]))
                if inputs is not None:
                    inputs.append(carry.x[None])
                carry = traced[run_of[index]](index, weights, carry)
            return carry
        for runs in _loops(self.config.runs):
            layers = sorted(layer for run in runs for layer in run.layers)
            first, last = max(start, layers[0]), min(depth, layers[-1] + 1)
            if first >= last:
                continue
            step = self._step(params, run_layer, runs, trained=carry.window is None)
            if carry.window is None:
                step = jax.checkpoint(step, prevent_cse=False)
            order = self._not_skipped(first, last)
            if inputs is None and len(order) == last - first:
                carry = lax.fori_loop(first, last, step, carry)
                continue

            def step_and_input(
                carry: LayerCarry, index: Int[Array, ""], step: Callable = step
            ) -> tuple[LayerCarry, Any]:
                return step(index, carry), None if inputs is None else carry.x

            carry, of_run = lax.scan(step_and_input, carry, order)
            if inputs is not None:
                inputs.append(of_run)
        return carry

    def _step(
        self,
        params: dict[str, Any],
        run_layer: LayerPass,
        runs: Sequence[LayerRun],
        *,
        trained: bool,
    ) -> Callable[[Int[Array, ""], LayerCarry], LayerCarry]:
        """Return the step of a loop over the layers of `runs`, as a function of layer and carry.

        Layers of several structures are chosen by their index; if `trained`, so that the step has a
        gradient.
        """
        steps = []
        for run in runs:
            weights_of = self._weights(params, run)

            def step(
                index: Int[Array, ""],
                carry: LayerCarry,
                run: LayerRun = run,
                weights_of: Callable = weights_of,
            ) -> LayerCarry:
                return run_layer(run, index, weights_of(among(run.layers, index)), carry)

            steps.append(step)
        if len(steps) == 1:
            return steps[0]
        numbers = {layer: number for number, run in enumerate(runs) for layer in run.layers}
        number_of = np.array([numbers[layer] for layer in range(len(numbers))], np.int32)

        def chosen(index: Int[Array, ""], carry: LayerCarry) -> LayerCarry:
            number = jnp.asarray(number_of)[index]
            if trained:
                return lax.switch(number, steps, index, carry)
            for each, step in enumerate(steps):
                carry = apply_if(number == each, functools.partial(step, index), carry)
            return carry

        return chosen

    def _not_skipped(self, first: int, last: int) -> Int[np.ndarray, "A"]:
        """Return the layers from `first` to `last` - 1 that run."""
        return np.setdiff1d(np.arange(first, last), self.skipped).astype(np.int32)

    def _outputs(
        self, params: dict[str, Any], carry: LayerCarry, requested: Features, *, logits: bool
    ) -> Extension:
        """Return the features and, if requested, the logits, from the last layer's carry."""
        available = {**carry.layer_inputs, "pre_norm": carry.x}
        if carry.experts is not None:
            available[EXPERTS] = jnp.moveaxis(carry.experts, 0, 2)
        if carry.queries is not None:
            available[QUERIES] = carry.queries.reshape(*carry.x.shape[:2], -1)
        logits_out = None
        if logits or requested.counts or "final_norm" in requested.names:
            available["final_norm"] = self.arithmetic.norm(carry.x, params["final_norm"])
        project = functools.partial(self._project, params)
        if logits:
            logits_out = project(available["final_norm"])
            available |= top_tokens(logits_out, requested.counts)
        elif requested.counts:
            available |= top_tokens_of_states(available["final_norm"], project, requested.counts)
        return Extension(
            logits_out, {name: available[name] for name in requested.names}, carry.window
        )

    def _project(
        self, params: dict[str, Any], states: Float[Array, "B T D"]
    ) -> Float[Array, "B T V"]:
        """Return the logits of final hidden states."""
        config = self.config
        logits = self.arithmetic.project("btd,dv->btv", states, params["head"], jnp.float32)
        logits = final_logits(logits, config)
        if config.unused_tokens:
            logits = jnp.where(unused_mask(config), IMPOSSIBLE, logits)
        return constrain(logits, "batch", None, "vocab" if self.shards > 1 else None)

    def _weights(
        self, params: dict[str, Any], run: LayerRun
    ) -> Callable[[Int[Array, ""]], dict[str, Any]]:
        """Return a function from a traced position among the layers of a run to their weights."""
        if self.form.layers == "apart":
            return layer_chooser([params["layers"][str(index)] for index in run.layers])
        return functools.partial(one_layer, params[run.name])


def _loops(runs: Sequence[LayerRun]) -> list[tuple[LayerRun, ...]]:
    """Return the runs of each loop over layers: one, or all of them if they are interleaved."""
    if all(run.is_contiguous for run in runs):
        return [(run,) for run in runs]
    return [tuple(runs)]


def attention(
    form: Form, config: DecoderConfig, cache: KVCache, tokens: int, split: bool
) -> Callable[..., Partial]:
    """Return the function `attend(query, cache, window, layer, seen, oldest)` of a form.

    It is for passes over `tokens` tokens through layers described by `config`; on a mesh the heads
    are sharded over `model` if `split`, otherwise replicated. Queries attend to the keys of the
    window marked in `seen`, and to all committed keys, or only to those from position `oldest` on
    and to the sinks of the config's sliding window.
    """
    window = config.sliding_window
    limits = {
        "softcap": config.attention.softcap,
        "sinks": 0 if window is None else window.sinks,
    }
    if form.cache_attention == "rows" and cpu_attention.attends(cache, tokens):
        return functools.partial(cpu_attention.attend_window_and_cache, **limits)
    if form.cache_attention == "kernel":
        # Pallas takes half a second to import, and only forms with a kernel need it.
        from specjax.models.kernels import attention_kernel

        if attention_kernel.takes(config.head_dim):
            return functools.partial(
                attention_kernel.attend_window_and_cache, split=split, **limits
            )
    attend_committed = _cache_attention(form, cache, split, limits)

    def attend_both(
        query: Float[Array, "B G X C"],
        cache: KVCache,
        window: Window,
        layer: Int[Array, ""] | int,
        seen: Bool[Array, "#B 1 X W"],
        oldest: Int[Array, "B X"] | None = None,
    ) -> Partial:
        keys, values = at_layer(window.k, layer), at_layer(window.v, layer)
        start = attend(query, keys, values, seen, config.attention.softcap)
        return attend_committed(query, cache, layer, start=start, oldest=oldest)

    return attend_both


def _cache_attention(
    form: Form, cache: KVCache, split: bool, limits: dict[str, Any]
) -> Callable[..., Partial]:
    """Return the function `attend(query, cache, layer, start=...)` with which a form reads a cache.

    It merges `start`, a partial result, with attention over the committed tokens. `limits` are the
    soft cap and the number of sinks.
    """
    if form.cache_attention == "rows":
        return functools.partial(attend_rows, split=split, **limits)
    if form.cache_attention == "tpu_kernel":
        from specjax.models.kernels import tpu_attention

        if tpu_attention.takes(cache):
            return functools.partial(tpu_attention.attend_committed, split=split, **limits)
    return functools.partial(attend_cache, blocks=cached_blocks(cache), **limits)
