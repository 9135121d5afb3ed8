"""Block drafters: a few layers over the target's features that predict a whole block in one pass.

DFlash (Chen et al. 2602.06036): the target's features of each position before the block are joined
to one vector, and every layer makes keys and values of these vectors with the same projections as
of the block itself, which is the last committed token (the anchor) and mask tokens. Tokens of the
block attend to all features and, unless `causal` (JetSpec), to the whole block. Embedding and
output head are the target's. DSpark (DeepSpec) adds a bias of each token's logits that depends on
the token before it, of low rank (`markov_rank`), and a head that estimates the probability that a
drafted token is accepted. DFlash2 (Inco AI) lets a slot see those before it by short convolutions
around attention and MLP, and chooses among each slot's likeliest tokens by a score of the token
before (`selector_rank`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.cache import KVCache, Window, put
from specjax.core.draft_vocabulary import check_draft_vocab_size
from specjax.core.top_tokens import likeliest
from specjax.errors import InputError
from specjax.fields import Whole, check_instance
from specjax.models.config import DecoderConfig, SlidingWindow
from specjax.models.decoder import Decoder, attention
from specjax.models.form import DEFAULT_FORM, Form
from specjax.models.head_config import HeadConfig
from specjax.models.layers.attention import Partial
from specjax.models.layers.decoder_layer import DecoderLayer, embed, rotate_by
from specjax.models.layers.layer_pass import write_window
from specjax.models.layers.local_and_global_layers import recent_keys
from specjax.models.parameter_table import linear, norm_table
from specjax.models.parameter_table import parameter_table as decoder_table
from specjax.models.parameters import Parameter, ParameterTable

Attend = Callable[
    [int, Float[Array, "B G X C"], Float[Array, "B T G C"], Float[Array, "B T G C"]], Partial
]
"""A function (layer, queries, keys, values) that returns the attention of a block's tokens."""
Candidates = tuple[Float[Array, "B #A k"], Int[Array, "B #A k"]]
"""The logits of the k tokens of each slot that a selector chooses among, and their indices."""
PARALLEL, SEQUENTIAL = "dflash", "dspark"
"""The kinds of heads, and the drafters' names: DSpark's have a Markov or a confidence head."""
_SIZES_OF_EXTRAS = {"conv_group_size": "conv_kernel_size", "selector_top_k": "selector_rank"}
"""Fields of `BlockConfig` with the one that must be above 0 for them to have an effect."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The parts of a block drafter, apart from its layers and vocabulary."""

    block_size: Annotated[int, Whole(1, 1024)]
    """The number of slots of a block, the anchor included."""
    causal: bool = False
    """Whether a slot attends only to itself and earlier slots of its block (JetSpec)."""
    sample_from_anchor: bool = False
    """Whether each slot predicts the next token, rather than a mask its own."""
    markov_rank: Annotated[int, Whole(0, 1 << 16)] = 0
    """The rank of the bias of logits by the token before (DSpark); 0 for none."""
    confidence: bool = False
    """Whether a head estimates the probability that a token is accepted (DSpark)."""
    conv_kernel_size: Annotated[int, Whole(0, 64)] = 0
    """The number of taps of convolutions around attention and MLP (DFlash2); 0 for none."""
    conv_group_size: Annotated[int, Whole(1)] = 16
    """The number of channels that share the part of a convolution's kernel that depends on its
    input.
    """
    selector_rank: Annotated[int, Whole(0, 1 << 16)] = 0
    """The rank of the scores by which a slot's token is selected, given the one before (DFlash2); 0
    for none.
    """
    selector_top_k: Annotated[int, Whole(1, 1024)] = 16
    """The number of tokens per slot among which the selector chooses."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(BlockShape, HeadConfig):
    """The config of a block drafter.

    `decoder` describes its layers, with the target's width and vocabulary (V): Llama's, with or
    without norms of queries and keys. `taps` are the names of the target's features that are
    joined, each of width `target_hidden_size` (Dt); `draft_vocab_size` (Vd) is the number of
    logits. The embedding of mask tokens is that of the target's token `mask_token_id`, or the
    head's own if that is not below V. `conv_group_size` and `selector_top_k` are their defaults
    where they have no effect. Raises InputError for inconsistent values.
    """

    decoder: DecoderConfig
    target_hidden_size: Annotated[int, Whole(1)]
    draft_vocab_size: Annotated[int, Whole(1)]
    taps: tuple[str, ...]
    mask_token_id: Annotated[int, Whole(0)]

    def __post_init__(self) -> None:
        check_instance(self, "")
        decoder = self.decoder
        plain = replace(decoder, attention=replace(decoder.attention, qk_norm=False))
        if (unlike_llama := plain.unlike_llama) is not None:
            raise InputError(
                f"{unlike_llama}: a block drafter's layers are Llama's, with or without norms of "
                "queries and keys; use its values"
            )
        check_draft_vocab_size(self.draft_vocab_size, decoder.vocab_size)
        if not self.taps:
            raise InputError("taps is empty: name the target's features that the drafter reads")
        if self.longest_draft < 1:
            raise InputError(
                f"block_size={self.block_size}: the anchor alone drafts nothing; use at least 2, "
                "or sample_from_anchor"
            )
        if self.conv_kernel_size and decoder.hidden_size % self.conv_group_size:
            raise InputError(
                f"conv_group_size={self.conv_group_size}: must divide the width "
                f"{decoder.hidden_size}"
            )
        if self.markov_rank and self.selector_rank:
            raise InputError(
                f"selector_rank={self.selector_rank}: markov_rank={self.markov_rank} already makes "
                "tokens depend on the one before; set one of them to 0"
            )
        if self.confidence and self.selector_rank:
            raise InputError(
                f"confidence=True: estimates acceptance without the choice that "
                f"selector_rank={self.selector_rank} makes; set confidence=False or selector_rank=0"
            )
        # What has no effect must not make two heads of one.
        for name, used in _SIZES_OF_EXTRAS.items():
            if not getattr(self, used):
                object.__setattr__(self, name, getattr(type(self), name))

    @property
    def kind(self) -> str:
        """The kind of head and the drafter's name: dspark with a Markov or confidence head."""
        return SEQUENTIAL if self.markov_rank or self.confidence else PARALLEL

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that the head reads, joined."""
        return self.taps

    @property
    def longest_draft(self) -> int:
        """The largest number of tokens that a block drafts (K)."""
        return self.block_size - 1 + self.sample_from_anchor

    @property
    def has_mask_embedding(self) -> bool:
        """Whether the embedding of mask tokens is the head's own, since they are no token."""
        return self.mask_token_id >= self.decoder.vocab_size

    def num_slots(self, tokens: int) -> int:
        """Return the number of slots, anchor included, of a block that drafts `tokens` tokens."""
        return tokens + 1 - self.sample_from_anchor

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the drafter's parameters, as a nested dict of `Parameter`.

        It is laid out as in `models.parameter_table`.
        """
        decoder, rank = self.decoder, self.markov_rank
        width, taps = decoder.hidden_size, len(self.taps) * self.target_hidden_size
        table: dict[str, Any] = {
            "fc": linear(taps, width, axes=(None, "embed")),
            "hidden_norm": norm_table(decoder),
            "layers": decoder_table(decoder, scan_layers=False)["layers"],
            "final_norm": norm_table(decoder),
        }
        if self.has_mask_embedding:
            table["mask"] = {"embedding": Parameter((width,), ("embed",))}
        if self.conv_kernel_size:
            for layer in table["layers"].values():
                layer["attention_conv"] = layer["mlp_conv"] = self._convolution_table()
        if self.selector_rank:
            shape, axes = (decoder.vocab_size, self.selector_rank), ("vocab", None)
            successors = Parameter((self.draft_vocab_size, shape[1]), axes, "zeros")
            table["selector"] = {
                "predecessors": {"embedding": Parameter(shape, axes)},
                "successors": {"embedding": successors},
                "projection": linear(width, self.selector_rank, axes=("embed", None)),
            }
        if rank:
            embedding = Parameter((decoder.vocab_size, rank), ("vocab", None))
            # Zeros, so that a new drafter's logits are those without the bias.
            kernel = Parameter((rank, self.draft_vocab_size), (None, "vocab"), "zeros")
            projection = {"kernel": kernel}
            table["markov"] = {"embed": {"embedding": embedding}, "projection": projection}
        if self.confidence:
            table["confidence"] = {
                "scale": Parameter((width + rank,), (None,), "zeros"),
                "bias": Parameter((1,), (None,), "zeros"),
            }
        return table

    def whole(
        self, params: dict[str, Any], draft_ids: Int[np.ndarray, "Vd"]
    ) -> tuple[HeadConfig, dict[str, Any]]:
        """Return config and parameters with logits for all V tokens rather than `draft_ids`.

        A Markov head or a selector has zeros outside the draft vocabulary.
        """
        vocab_size = self.target_vocab_size
        if "markov" in params:
            kernel = np.asarray(params["markov"]["projection"]["kernel"])
            whole = np.zeros((len(kernel), vocab_size), kernel.dtype)
            whole[:, draft_ids] = kernel
            params = {**params, "markov": {**params["markov"], "projection": {"kernel": whole}}}
        if "selector" in params:
            rows = np.asarray(params["selector"]["successors"]["embedding"])
            whole = np.zeros((vocab_size, rows.shape[1]), rows.dtype)
            whole[draft_ids] = rows
            selector = {**params["selector"], "successors": {"embedding": whole}}
            params = {**params, "selector": selector}
        return super().whole(params, draft_ids)

    def _convolution_table(self) -> dict[str, Any]:
        """Return the kernels of a sublayer's input and output, and what adds to them by input."""
        width, taps = self.decoder.hidden_size, self.conv_kernel_size
        groups = width // self.conv_group_size
        added = Parameter((width, 2 * taps * groups), ("embed", None), "zeros")
        base = Parameter((2, taps, width), (None, None, "embed"), "first_tap")
        return {"base": base, "projection": {"kernel": added}}


def default_taps(num_layers: int, count: int) -> tuple[str, ...]:
    """Return DFlash's taps: the outputs of `count` layers, evenly spaced from 1 to L - 3."""
    last = max(num_layers - 3, 1)
    outputs = [round(1 + index * (last - 1) / max(count - 1, 1)) for index in range(count)]
    inputs = sorted({min(output + 1, num_layers - 1) for output in outputs})
    return tuple(f"layer_input:{layer}" for layer in inputs)


@dataclass(frozen=True)
class BlockHead:
    """A block drafter as pure functions of its parameters; hashable.

    `params` has its own parameters, and under "shared" the target's embedding and the columns of
    its output head (`shared_parameters.share`). An embedding under "mask" is that of all mask
    tokens. The other fields are those of `PairHead`.
    """

    config: BlockConfig
    dtype: jnp.dtype
    multiply: jnp.dtype | None = None
    shards: int = 1
    form: Form = DEFAULT_FORM
    cache_dtype: jnp.dtype | None = None
    sliding_window: SlidingWindow | None = None

    @property
    def arithmetic(self) -> DecoderLayer:
        """The arithmetic of one of the head's layers."""
        return DecoderLayer(self.config.decoder, self.dtype, self.shards, self.multiply)

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Return random parameters, boxed with the logical names of their axes."""
        return ParameterTable(self.config.parameter_table(), self.dtype).init(key)["params"]

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache [L, B, G, S, C] of the keys and values of features."""
        return self._decoder.make_cache(batch, capacity)

    def fuse(
        self, params: dict[str, Any], features: dict[str, Float[Array, "B T Dt"]]
    ) -> Float[Array, "B T D"]:
        """Return the vector of each position that all layers read: its taps, joined and normed."""
        taps = [features[name].astype(self.dtype) for name in self.config.taps]
        joined = jnp.concatenate(taps, axis=-1)
        fused = self.arithmetic.project("btd,dn->btn", joined, params["fc"])
        return self.arithmetic.norm(fused, params["hidden_norm"])

    def context(
        self,
        params: dict[str, Any],
        fused: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> Window:
        """Return the keys and values of all layers [L, B, G, T, C] for vectors of `fuse`."""
        rotation = rotate_by(positions, self.config.decoder)
        layers = []
        for index in range(self.config.decoder.num_layers):
            attention_of_layer = self._layer(params, index)["attention"]
            heads = self.arithmetic.heads(fused, attention_of_layer, rotation, self._copies)
            layers.append([entries.transpose(0, 2, 1, 3) for entries in (heads.key, heads.value)])
        return Window(*(jnp.stack(entries) for entries in zip(*layers, strict=True)))

    def states(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        slots: int,
    ) -> Float[Array, "B T D"]:
        """Return the states of the tokens of blocks, from which logits are computed.

        Each block has `slots` tokens, and `attend` is the attention of a layer.
        """
        rotation = rotate_by(positions, self.config.decoder)
        x = self.arithmetic.whole(self._embed(params, tokens, slots))
        for index in range(self.config.decoder.num_layers):
            layer = self._layer(params, index)
            normed = self.arithmetic.norm(x, layer["attention_norm"])
            normed, finish = self._convolved(layer.get("attention_conv"), normed, slots)
            heads = self.arithmetic.heads(normed, layer["attention"], rotation, self._copies)
            mixed = attend(index, heads.query, heads.key, heads.value)
            out = self.arithmetic.add_attention(jnp.zeros_like(x), mixed, layer, heads.gate)
            x = self.arithmetic.whole(x + finish(out))
            normed = self.arithmetic.norm(x, layer["mlp_norm"])
            normed, finish = self._convolved(layer.get("mlp_conv"), normed, slots)
            x = self.arithmetic.whole(x + finish(self.arithmetic.mlp(normed, layer["mlp"])))
        return self.arithmetic.norm(x, params["final_norm"])

    def _embed(
        self, params: dict[str, Any], tokens: Int[Array, "B T"], slots: int
    ) -> Float[Array, "B T D"]:
        """Return the embeddings of the tokens of blocks of `slots` tokens."""
        if "mask" not in params:
            return embed(params["shared"], tokens, self.dtype)
        is_root = (jnp.arange(tokens.shape[1]) % slots == 0)[None, :]
        roots = embed(params["shared"], jnp.where(is_root, tokens, 0), self.dtype)
        mask = params["mask"]["embedding"].astype(self.dtype)
        return jnp.where(is_root[:, :, None], roots, mask[None, None, :])

    def _convolved(
        self, weights: dict[str, Any] | None, x: Float[Array, "B T D"], slots: int
    ) -> tuple[Float[Array, "B T D"], Callable[[jax.Array], jax.Array]]:
        """Return the input of a sublayer after its convolution, and that of the sublayer's output.

        Kernels depend on `x`; they do not reach beyond a block's first slot.
        """
        if weights is None:
            return x, lambda out: out
        taps, group = self.config.conv_kernel_size, self.config.conv_group_size
        by_block = (-1, slots, x.shape[-1] // group, group)
        added = self.arithmetic.project("btd,dn->btn", x, weights["projection"])
        added = added.reshape(-1, slots, 2, taps, by_block[2], 1)

        def convolve(x: jax.Array, which: int) -> jax.Array:
            blocks, out = x.reshape(by_block), jnp.float32(0)
            for tap in range(taps):
                before = jnp.pad(blocks, ((0, 0), (tap, 0), (0, 0), (0, 0)))[:, :slots]
                kernel = weights["base"][which, tap].reshape(1, 1, *by_block[2:])
                out += before * (kernel.astype(x.dtype) + added[:, :, which, tap])
            return out.reshape(x.shape).astype(x.dtype)

        return convolve(x, 0), lambda out: convolve(out, 1)

    def visible(self, slots: int) -> Bool[Array, "T T"]:
        """Return a mask of the slots of a block of T = `slots` slots that each slot attends to."""
        seen = jnp.ones((slots, slots), bool)
        return jnp.tril(seen) if self.config.causal else seen

    def extend(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
    ) -> Float[Array, "B T D"]:
        """Run one block per row, which reads the features in the cache; return its states."""
        batch, slots = tokens.shape
        decoder, visible, limits = self._decoder, self.visible(slots)[None], {}
        window = decoder.make_window(batch, slots)
        repeats = decoder.config.num_heads // decoder.cached_heads
        if self.sliding_window is not None:
            visible, oldest = recent_keys(self.sliding_window, positions, positions, visible)
            limits = {"oldest": jnp.repeat(oldest, repeats, axis=1)}
        seen = jnp.repeat(visible, repeats, axis=1)[:, None]
        attend_both = attention(self.form, decoder.config, cache, slots, split=self.shards > 1)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Partial:
            entries = cache.rounded(key), cache.rounded(value)
            k, v = (
                write_window(into, new, layer, 0)
                for into, new in zip((window.k, window.v), entries, strict=True)
            )
            return attend_both(query, cache, Window(k, v), layer, seen, **limits)

        return self.states(params, tokens, positions, attend, slots)

    def logits(
        self, params: dict[str, Any], states: Float[Array, "B A D"]
    ) -> Float[Array, "B A Vd"]:
        """Return draft logits in float32, as they are without the token before."""
        head = params["shared"]["draft_head"]
        return self.arithmetic.project("btd,dv->btv", states, head, jnp.float32)

    def candidates(self, logits: Float[Array, "B A Vd"]) -> Candidates | None:
        """Return the logits and indices of the tokens that can be drafted; None for all tokens."""
        if not self.config.selector_rank:
            return None
        return likeliest(logits, min(self.config.selector_top_k, logits.shape[2]))

    def logits_after(
        self,
        params: dict[str, Any],
        logits: Float[Array, "B #A Vd"],
        candidates: Candidates | None,
        states: Float[Array, "B #A D"],
        previous: Int[Array, "B A"],
    ) -> Float[Array, "B #A Vd"]:
        """Return the logits given the previous tokens, which a Markov head or a selector reads.

        `logits`, `candidates` and `states` are the results of `logits`, `candidates` and `states`.
        """
        if self.config.markov_rank:
            return logits + self.bias(params, self.embed_previous(params, previous))
        if candidates is None:
            return logits
        unary, chosen = candidates
        scores = unary + self.edges(params, states, previous, chosen)
        into = jnp.broadcast_to(chosen, scores.shape).reshape(-1, scores.shape[2])
        nothing = jnp.full((len(into), logits.shape[2]), -jnp.inf, logits.dtype)
        selected = put(nothing, into, scores.reshape(into.shape))
        return selected.reshape(*scores.shape[:2], -1)

    def embed_previous(
        self, params: dict[str, Any], previous: Int[Array, "B A"]
    ) -> Float[Array, "B A R"]:
        """Return the Markov head's embeddings of previous tokens; of width R = 0 without one."""
        if not self.config.markov_rank:
            return jnp.zeros((*previous.shape, 0), self.dtype)
        return embed(params["markov"], previous, self.dtype)

    def bias(
        self, params: dict[str, Any], embedded: Float[Array, "B A R"]
    ) -> Float[Array, "B A Vd"]:
        """Return the Markov head's bias of logits, from embeddings of the previous tokens."""
        projection = params["markov"]["projection"]
        return self.arithmetic.project("btr,rv->btv", embedded, projection, jnp.float32)

    def edges(
        self,
        params: dict[str, Any],
        states: Float[Array, "B #A D"],
        previous: Int[Array, "B A"],
        candidates: Int[Array, "B #A k"],
    ) -> Float[Array, "B A k"]:
        """Return what the selector adds to the logits of each slot's candidates.

        `previous` are token ids, and `candidates` indices of logits.
        """
        weights = params["selector"]
        after = jnp.take(weights["predecessors"]["embedding"], previous, axis=0)
        gate = self.arithmetic.project("btd,dr->btr", states, weights["projection"])
        rows = jnp.take(weights["successors"]["embedding"], candidates, axis=0)
        query = (after.astype(gate.dtype) * gate)[:, :, None, :]
        return jnp.sum(query * rows.astype(gate.dtype), axis=-1).astype(jnp.float32)

    def confidence_logit(
        self,
        params: dict[str, Any],
        states: Float[Array, "B A D"],
        embedded: Float[Array, "B A R"],
    ) -> Float[Array, "B A"]:
        """Return the logit of the estimated probability that the predicted token is accepted.

        `embedded` are embeddings of the previous tokens.
        """
        inputs = jnp.concatenate([states, embedded], axis=-1).astype(jnp.float32)
        scale, bias = (params["confidence"][name].astype(jnp.float32) for name in ("scale", "bias"))
        return jnp.einsum("bad,d->ba", inputs, scale, precision="highest") + bias[None]

    @property
    def _copies(self) -> int:
        return self._decoder.cached_heads // self.config.decoder.num_kv_heads

    @property
    def _decoder(self) -> Decoder:
        """A decoder that consists of the layers, used to lay out keys and values."""
        config = replace(self.config.decoder, sliding_window=self.sliding_window)
        return Decoder(config, self.dtype, self.shards, cache_dtype=self.cache_dtype)

    def _layer(self, params: dict[str, Any], index: int) -> dict[str, Any]:
        # Without the barrier, as in the decoder, XLA may split the heads again.
        return lax.optimization_barrier(params["layers"][str(index)])
