"""EAGLE heads: one decoder layer that predicts the target's next features from its last ones.

EAGLE-1 (Li et al. 2401.15077) reads concat(embedding, feature) through a linear layer and the
target's own head; EAGLE-3 (Li et al. 2503.01840) fuses features of three layers, attends to
concat(norm(embedding), norm(feature)) and has a head of its own. The pair at position t is
(x_{t+1}, f_t); its output predicts x_{t+2}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.cache import KVCache, Window, make_cache
from specjax.errors import InputError
from specjax.models.config import DecoderConfig
from specjax.models.decoder import write_window
from specjax.models.layers.attention import Partial, attend, attend_cache, cached_blocks
from specjax.models.layers.decoder_layer import (
    Block,
    Rotation,
    embed,
    merge_heads,
    rms_norm,
    rotate_by,
)
from specjax.models.parameters import Parameter, ParameterTable


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE head's shape and published flags.

    `decoder` describes its one layer, with the target's vocabulary (V). `taps` name the target's
    features of width `target_hidden_size` (Dt), `draft_vocab_size` (Vd) counts its logits. Flags of
    version 3: `norm_before_residual` (the residual is the normed feature), `norm_before_fc` (a norm
    over all taps), `fc_norm` (a norm for each tap), `norm_output` (the normed output is fed back),
    `own_embedding`. Raises InputError for sizes or flags that do not fit together.
    """

    decoder: DecoderConfig
    version: int
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[str, ...]
    fc_bias: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise InputError(f"version={self.version}: use 1 (EAGLE-1 and 2) or 3")
        if self.decoder.num_layers != 1:
            raise InputError(f"num_layers={self.decoder.num_layers}: an EAGLE head has one layer")
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise InputError(
                f"draft_vocab_size={self.draft_vocab_size}: must be in "
                f"1..{self.decoder.vocab_size}, the target's vocabulary"
            )
        if not self.taps:
            raise InputError("taps is empty: name the target's features that the head reads")
        if self.version == 1:
            flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            given = [flag for flag in (*flags, "own_embedding") if getattr(self, flag)]
            if given:
                raise InputError(f"{given[0]}=True: version 1 has no such part; leave it out")
            if self.taps != ("final_norm",):
                raise InputError(f"taps={self.taps}: version 1 reads one feature, final_norm")
            if self.target_hidden_size != self.decoder.hidden_size:
                raise InputError(
                    f"hidden_size={self.decoder.hidden_size}: version 1 must be as wide as its "
                    f"target, {self.target_hidden_size}, whose head it uses"
                )

    @property
    def attention_width(self) -> int:
        """Inputs of the query, key and value projections."""
        return self.decoder.hidden_size * (2 if self.version == 3 else 1)


def default_taps(num_layers: int) -> tuple[str, ...]:
    """EAGLE-3's taps: the inputs of layers 2, L/2 and L - 3, as published."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not 0 < low < middle < high:
        low, middle, high = 0, num_layers // 2, num_layers - 1
    return tuple(f"layer_input:{layer}" for layer in (low, middle, high))


def parameter_table(config: EagleConfig) -> dict[str, Any]:
    """Every parameter of a head, laid out as in `decoder.parameter_table`."""
    decoder = config.decoder
    width, hidden = decoder.hidden_size, decoder.intermediate_size
    heads, kv_heads, head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    taps = len(config.taps) * config.target_hidden_size

    def kernel(*shape: int, axes: tuple[str | None, ...], bias: bool = False) -> dict[str, Any]:
        entry = {"kernel": Parameter(shape, axes)}
        if bias:
            entry["bias"] = Parameter(shape[1:], axes[1:], "zeros")
        return entry

    def norm(size: int = width) -> dict[str, Any]:
        return {"scale": Parameter((size,), ("embed",), "ones")}

    bias = decoder.attention_bias
    attended = config.attention_width
    up = ("embed", "mlp")
    layer: dict[str, Any] = {
        "attention": {
            "query": kernel(
                attended, heads, head_dim, axes=("embed", "heads", "head_dim"), bias=bias
            ),
            "key": kernel(
                attended, kv_heads, head_dim, axes=("embed", "kv_heads", "head_dim"), bias=bias
            ),
            "value": kernel(
                attended, kv_heads, head_dim, axes=("embed", "kv_heads", "head_dim"), bias=bias
            ),
            "output": {"kernel": Parameter((heads, head_dim, width), ("heads", None, "embed"))},
        },
        "mlp_norm": norm(),
        "mlp": {
            "gate": kernel(width, hidden, axes=up, bias=decoder.mlp_bias),
            "up": kernel(width, hidden, axes=up, bias=decoder.mlp_bias),
            "down": kernel(hidden, width, axes=("mlp", "embed"), bias=decoder.mlp_bias),
        },
    }
    fused = 2 * width if config.version == 1 else taps
    table: dict[str, Any] = {
        "fc": kernel(fused, width, axes=(None, "embed"), bias=config.fc_bias),
        "layer": layer,
    }
    if config.version == 3:
        layer["embedding_norm"], layer["hidden_norm"] = norm(), norm()
        table["final_norm"] = norm()
        table["head"] = kernel(width, config.draft_vocab_size, axes=("embed", "vocab"))
    if config.norm_before_fc:
        table["input_norm"] = norm(taps)
    if config.fc_norm:
        table["fc_norm"] = {
            str(tap): norm(config.target_hidden_size) for tap in range(len(config.taps))
        }
    if config.own_embedding:
        table["embed"] = {"embedding": Parameter((decoder.vocab_size, width), ("vocab", "embed"))}
    return table


@dataclass(frozen=True)
class Eagle:
    """An EAGLE head as plain functions of its parameters; hashable.

    `params` are the head's own, and under "shared" the target's arrays (`share`): its embedding,
    and for version 1 the columns of its head.
    """

    config: EagleConfig
    dtype: jnp.dtype
    multiply: jnp.dtype | None = None

    @property
    def block(self) -> Block:
        """The arithmetic of its layer."""
        return Block(self.config.decoder, self.dtype, multiply=self.multiply)

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Random parameters, boxed with the logical names of their axes."""
        return ParameterTable(parameter_table(self.config), self.dtype).init(key)["params"]

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache [1, B, G, S, C]."""
        decoder = self.config.decoder
        return make_cache(1, batch, decoder.num_kv_heads, capacity, decoder.head_dim, self.dtype)

    def make_window(self, batch: int, slots: int) -> Window:
        """An empty window [1, B, G, W, C]."""
        decoder = self.config.decoder
        shape = (1, batch, decoder.num_kv_heads, slots, decoder.head_dim)
        return Window(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))

    def fuse(
        self, params: dict[str, Any], features: dict[str, Float[Array, "B T Dt"]]
    ) -> Float[Array, "B T D"]:
        """The head's first hidden states: all taps of the target through one linear layer."""
        taps = [features[name].astype(self.dtype) for name in self.config.taps]
        if self.config.version == 1:
            return taps[0]
        eps = self.config.decoder.rms_norm_eps
        if self.config.fc_norm:
            taps = [
                rms_norm(tap, params["fc_norm"][str(index)]["scale"], eps)
                for index, tap in enumerate(taps)
            ]
        fused = jnp.concatenate(taps, axis=-1)
        if self.config.norm_before_fc:
            fused = rms_norm(fused, params["input_norm"]["scale"], eps)
        return self.block.project("btd,dn->btn", fused, params["fc"])

    def inputs(
        self, params: dict[str, Any], tokens: Int[Array, "B T"], hidden: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T Din"]]:
        """The residual stream, and attention's input, for pairs of token and hidden state."""
        source = params if self.config.own_embedding else params["shared"]
        embedded = embed(source, tokens, self.dtype)
        if self.config.version == 1:
            both = jnp.concatenate([embedded, hidden], axis=-1)
            fused = self.block.project("btd,dn->btn", both, params["fc"])
            return fused, fused
        layer = params["layer"]
        normed = self.block.norm(hidden, layer["hidden_norm"])
        both = jnp.concatenate([self.block.norm(embedded, layer["embedding_norm"]), normed], -1)
        return (normed if self.config.norm_before_residual else hidden), both

    def heads(
        self,
        params: dict[str, Any],
        attended: Float[Array, "B T Din"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B G X C"], Float[Array, "B T G C"], Float[Array, "B T G C"]]:
        """Queries, keys and values at those positions."""
        rotation: Rotation = rotate_by(positions, self.config.decoder)
        return self.block.heads(attended, self._layer(params)["attention"], rotation, 1)

    def finish(
        self, params: dict[str, Any], residual: Float[Array, "B T D"], mixed: Partial
    ) -> Float[Array, "B T D"]:
        """The layer's output: attention's result added to the residual stream, then the MLP."""
        layer = self._layer(params)
        x = self.block.add_attention(residual, mixed, layer["attention"])
        return self.block.add_mlp(x, layer)

    def next_hidden(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The hidden state that the next draft step reads instead of the target's feature."""
        return self._normed(params, output) if self.config.norm_output else output

    def logits(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T Vd"]:
        """Draft logits in float32 of the layer's outputs."""
        states, kernel = self.readout(params, output), self.logit_kernel(params)
        return self.block.project("btd,dv->btv", states, {"kernel": kernel}, jnp.float32)

    def readout(
        self, params: dict[str, Any], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The layer's outputs after the final norm; `logit_kernel` turns them into logits."""
        return self._normed(params, output) if self.config.version == 3 else output

    def logit_kernel(self, params: dict[str, Any]) -> Float[Array, "D Vd"]:
        """The output projection: the head's own, or the target's columns."""
        source = params["head"] if self.config.version == 3 else params["shared"]["draft_head"]
        return source["kernel"]

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
    ) -> tuple[Float[Array, "B T D"], Window]:
        """Outputs of T pairs, and the window with them in slots start..start+T."""
        residual, attended = self.inputs(params, tokens, hidden)
        query, key, value = self.heads(params, attended, positions)
        window = Window(
            write_window(window.k, key, 0, start), write_window(window.v, value, 0, start)
        )
        repeats = self.config.decoder.num_heads // self.config.decoder.num_kv_heads
        seen = jnp.repeat(visible, repeats, axis=1)[:, None]
        mixed = attend(query, window.k[0], window.v[0], seen)
        mixed = attend_cache(query, cache, 0, mixed, cached_blocks(cache))
        return self.finish(params, residual, mixed), window

    def _layer(self, params: dict[str, Any]) -> dict[str, Any]:
        return merge_heads(params["layer"], self.config.decoder)

    def _normed(self, params: dict[str, Any], x: Float[Array, "B T D"]) -> jax.Array:
        return self.block.norm(x, params["final_norm"])
