"""The config of a decoder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from specjax.errors import InputError, shown

MOST_LAYERS = 1 << 16
_MOST_EXPERTS = 1 << 17
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_layers": MOST_LAYERS,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_positions": 1 << 30,
}
"""Far above every existing model: a larger size means a damaged file. Positions, and offsets added
to them within a round, are int32."""

_SMALLEST_REAL, _LARGEST_REAL = 1e-15, 1e15
"""Limits that keep the quotient of any two of a config's reals finite and non-zero in float32."""

UNLIMITED = _LARGEST_REAL
"""A limit that no number reaches; metadata of checkpoints are JSON, which has no infinity."""


Mixer = Literal["attention", "recurrent", "absent"]
"""What mixes the tokens in a layer: nothing does in one that is an MLP alone."""


@dataclass(frozen=True)
class RopeScaling:
    """A scaling of the rotary frequencies for longer contexts.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1) divides low frequencies by
    `factor`, keeps high ones, and interpolates between wavelengths of original_max_positions /
    high_freq_factor and original_max_positions / low_freq_factor tokens. `yarn` (2309.00071) also
    keeps high and divides low frequencies; it interpolates by the frequency's index, between the
    frequencies that turn `beta_fast` and `beta_slow` times in original_max_positions tokens, whose
    indices are rounded outwards if `truncate`. `factors` divides each of the C/2 frequencies by its
    own factor; with `short_factors` (LongRoPE, 2402.13753) a model of at most
    original_max_positions positions uses these. Rotated dimensions of queries and keys are
    multiplied by `attention_factor`.
    """

    kind: Literal["linear", "llama3", "factors", "yarn"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Norm:
    """The kind of norm in the layers and before the output head.

    `kind` is `rms` (with a scale) or `layer` (subtracts the mean; with a scale and a bias). Scales
    are stored minus `offset`, which is 1 in Gemma, whose norms multiply by 1 + scale. With `before`
    the inputs of attention and MLP are normed, and with `after` their results, before they are
    added to the residual stream (Gemma and GLM-4 do both, OLMo 2 only the latter). With
    `before_recurrent` recurrent layers norm their inputs alone, whatever the others do (OLMo
    hybrid).
    """

    kind: Literal["rms", "layer"] = "rms"
    offset: Literal[0, 1] = 0
    after: bool = False
    before: bool = True
    before_recurrent: bool = False

    def places(self, mixer: Mixer) -> tuple[bool, bool]:
        """Return whether layers with a mixer norm inputs, and whether they norm results."""
        if self.before_recurrent and mixer == "recurrent":
            return True, False
        return self.before, self.after


@dataclass(frozen=True)
class Latent:
    """The low-rank projections of latent attention (DeepSeek-V2: 2405.04434, section 2.1).

    Keys and values of all heads are projected from a vector of `kv_rank` numbers, after an RMS
    norm, and queries likewise from one of `query_rank`, or directly if that is None. The rotated
    dimensions of keys are projected from the layer's input instead, and all heads have the same.
    Values have `value_dim` dimensions, and are padded to C in caches. With `paired`, rotated
    dimensions are pairs of neighbours instead of half-split.
    """

    kv_rank: int
    query_rank: int | None = None
    value_dim: int = 128
    paired: bool = True


@dataclass(frozen=True)
class Attention:
    """The properties of attention in which model families differ.

    If the decoder has `attention_bias`, `output_bias` says whether the output projection has a bias
    too. `qk_norm` is an RMS norm of queries and keys before rotation, over each `head` or over all
    heads of the `projection` (OLMo 2). `query_scale` multiplies queries (None: 1/sqrt(C)).
    `softcap` limits scores to c tanh(score/c). `rotary_width` is the number of leading dimensions
    of a head that are rotated: None for all, 0 for none. `unrotated` marks layers without rotation,
    and repeats over the layers (SmolLM3). With `gated` the projection of queries also has a gate
    per head, whose sigmoids multiply the head's result (Qwen3-Next). With `sink_logits` each query
    head has a learned logit that adds to the denominator of its softmax (gpt-oss). `latent` are the
    low-rank projections of latent attention, or None; biases are then those of projections of the
    layer's input, except direct ones of queries, and of the output.
    """

    output_bias: bool = True
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    query_scale: float | None = None
    softcap: float | None = None
    rotary_width: int | None = None
    unrotated: tuple[bool, ...] = (False,)
    gated: bool = False
    sink_logits: bool = False
    latent: Latent | None = None


@dataclass(frozen=True)
class SlidingWindow:
    """The layers in which a token attends to only the last `size` tokens, itself included.

    `pattern` marks these layers and repeats over the layers. `rope_theta` is a separate rotary base
    for these layers, without scaling (Gemma 3), or None. Tokens also attend to the first `sinks`
    tokens of a row (StreamingLLM: Xiao et al. 2309.17453).
    """

    size: int
    pattern: tuple[bool, ...] = (True,)
    rope_theta: float | None = None
    sinks: int = 0

    def layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each of `num_layers` layers whether it has the window."""
        return _over_layers(self.pattern, num_layers)


@dataclass(frozen=True)
class Mlp:
    """The activation of the MLP, and whether a second projection gates it.

    `gelu_tanh` is GELU approximated by tanh (GPT-2's `gelu_new`), `gelu` the exact function,
    `relu2` the square of ReLU, and `gelu_sigmoid` x sigmoid(1.702 x). With a `limit` c, the gate is
    at most c and what it gates within -c and c; to the latter `offset` is added (both gpt-oss).
    """

    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "gelu_sigmoid"] = "silu"
    gated: bool = True
    limit: float | None = None
    offset: Literal[0, 1] = 0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, from layer `num_dense` on.

    Each token uses `per_token` of `num_experts` (E) gated MLPs of width `intermediate_size`. Their
    outputs are weighted by router scores: the `softmax` over all experts or `sigmoid`s, divided by
    their sum with `normalize`, times `scale`. With `selection_bias`, a bias per expert affects the
    selection but not the scores (2408.15664). With `groups`, experts are selected only from the
    `groups_per_token` groups with the largest sums of their `group_scores` best scores
    (2412.19437). `shared_size` is the width of an MLP that is added for every token, or 0; with
    `shared_gate` its result is multiplied by the sigmoid of a product of the input with a vector
    (Qwen3-Next). With `bias` the router and the experts have biases.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_scores: int = 2
    shared_size: int = 0
    shared_gate: bool = False
    num_dense: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of a decoder, which have a state instead of keys and values.

    `kind` is `delta` (the gated delta rule: Yang et al. 2412.06464), `mamba2` (Dao and Gu
    2405.21060) or `conv`, a gated convolution alone (LFM2). The convolution reads `conv_width` (K)
    tokens. Linear attention has `value_heads` (H) matrices of `key_width` (N) keys and
    `value_width` (P) values; the heads share `key_heads` (G) keys and queries. A convolution alone
    has `value_heads` times `value_width` channels. Mamba-2 limits its steps to `step_limits`, and
    norms the results of heads that share keys together. The delta rule's share b of a new value is
    a sigmoid, or twice that if `doubled` (Grazzi et al. 2411.12537). `norm_epsilon` is that of the
    norm of results, or None for that of the model.
    """

    kind: Literal["delta", "mamba2", "conv"]
    conv_width: int = 4
    key_heads: int = 1
    value_heads: int = 1
    key_width: int = 1
    value_width: int = 1
    conv_bias: bool = False
    bias: bool = False
    step_limits: tuple[float, float] = (0.0, UNLIMITED)
    doubled: bool = False
    norm_epsilon: float | None = None

    @property
    def blocks(self) -> int:
        """The number of parts that devices of a mesh can share: heads with all that is theirs.

        They are value heads or, in the delta rule, key heads with the value heads of each.
        """
        return self.key_heads if self.kind == "delta" else self.value_heads

    def shards(self, most: int) -> int:
        """Return over how many of `most` devices a layer is sharded: all, or 1 if it is whole."""
        return most if self.blocks % most == 0 else 1

    def groups(self, shards: int) -> int:
        """Return the number of key heads, each repeated so that all `shards` of a layer have some.

        Of a convolution alone it is the number of groups of channels.
        """
        return math.lcm(self.key_heads, shards)

    def channels(self, shards: int) -> int:
        """Return the number of inputs of the convolution in each group: query, key and values."""
        values = self.value_heads // self.groups(shards) * self.value_width
        return values + 2 * self.key_width * self.has_matrix

    @property
    def has_matrix(self) -> bool:
        """Whether a layer's state has a matrix per head, besides the inputs of its convolution."""
        return self.kind != "conv"


class LayerRun(NamedTuple):
    """Layers of the same structure, whose parameters may be stacked under `name`.

    `layers` are their indices, ascending, `mixer` is what mixes tokens in them, `mlp` says whether
    they have an MLP or experts, and `sparse` whether these are experts.
    """

    name: str
    layers: tuple[int, ...]
    mixer: Mixer
    mlp: bool
    sparse: bool

    @property
    def is_contiguous(self) -> bool:
        """Whether no other layer is between them."""
        return self.layers[-1] - self.layers[0] == len(self.layers) - 1


@dataclass(frozen=True)
class Embedding:
    """How token ids become vectors: a factor, and whether a position embedding is added."""

    scale: float = 1.0
    positions: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder; the defaults are Llama's (RMSNorm, RoPE, gated SiLU MLP).

    Hashable, so that it can be a static argument of jit. `vocab_size` is V, `hidden_size` D,
    `intermediate_size` F, `num_layers` L, `num_heads` H, `num_kv_heads` G, `head_dim` C,
    `max_positions` the longest context in tokens, `rms_norm_eps` the epsilon of norms of either
    kind. What attention and MLP add to the residual stream is multiplied by `residual_scale`.
    `mixers` says of each layer whether it has attention or is a layer of `recurrence`, and `mlps`
    whether it has an MLP; both repeat over the layers.
    Logits are divided by `logit_divisor` (both Granite), and then `logit_softcap` limits them to
    c tanh(logit/c). `family` selects the names of tensors
    and config fields in files, but does not change the arithmetic. `unused_tokens` are ids,
    ascending, without a token in the tokenizer; their probability is 0. Raises InputError for
    inconsistent sizes.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm: Norm = Norm()
    attention: Attention = Attention()
    sliding_window: SlidingWindow | None = None
    mlp: Mlp = Mlp()
    embedding: Embedding = Embedding()
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    experts: Experts | None = None
    recurrence: Recurrence | None = None
    mixers: tuple[Mixer, ...] = ("attention",)
    mlps: tuple[bool, ...] = (True,)
    family: str = "llama"
    unused_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, largest in _LARGEST.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                raise InputError(
                    f"{field}={shown(value)}: must be a whole number of at least 1 and at most "
                    f"{largest}; repair the config"
                )
        for field in ("rms_norm_eps", "rope_theta"):
            _check_real(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads}: must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2 and self.attention.rotary_width is None:
            raise InputError(f"head_dim={self.head_dim}: must be even, RoPE turns pairs")
        if self.rotary_width % 2 or not 0 <= self.rotary_width <= self.head_dim:
            raise InputError(
                f"attention.rotary_width={self.rotary_width}: must be even and at most "
                f"head_dim={self.head_dim}"
            )
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling, self.rotary_width, self.rope_theta)
        _check_unused(self.unused_tokens, self.vocab_size)
        _check_nested(self)

    @property
    def rotary_width(self) -> int:
        """The number of rotated dimensions per head."""
        width = self.attention.rotary_width
        return self.head_dim if width is None else width

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The layers in groups of equal structure, in the order of their first layers."""
        dense = self.num_layers if self.experts is None else self.experts.num_dense
        some_sparse = dense < self.num_layers
        groups: dict[tuple[Mixer, bool, bool], list[int]] = {}
        for layer in range(self.num_layers):
            mixer, mlp = _at(self.mixers, layer), _at(self.mlps, layer)
            groups.setdefault((mixer, mlp, mlp and layer >= dense), []).append(layer)
        names = {"attention": "", "recurrent": "recurrent_", "absent": "mlp_"}
        return tuple(
            LayerRun(
                f"{names[mixer]}{'dense_' if some_sparse and not sparse else ''}layers",
                tuple(layers),
                *(mixer, mlp, sparse),
            )
            for (mixer, mlp, sparse), layers in groups.items()
        )

    @property
    def num_sparse(self) -> int:
        """The number of layers with experts."""
        return sum(len(run.layers) for run in self.runs if run.sparse)

    def layers_with(self, mixer: Mixer) -> tuple[int, ...]:
        """Return the indices of the layers that have this mixer."""
        return tuple(layer for layer in range(self.num_layers) if _at(self.mixers, layer) == mixer)

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has the sliding window, by layer."""
        window = self.sliding_window
        return (False,) * self.num_layers if window is None else window.layers(self.num_layers)

    @property
    def unrotated(self) -> tuple[bool, ...]:
        """Whether each layer lacks rotation, by layer."""
        return _over_layers(self.attention.unrotated, self.num_layers)

    def llama_layers(self, num_layers: int) -> DecoderConfig:
        """Return the config of a Llama decoder with `num_layers` layers, for trained heads.

        Its sizes are those of this config; biases, and fields that other families use, are reset.
        """
        if self.unlike_llama is None:
            return replace(self, num_layers=num_layers, family="llama")
        scaling = self.rope_scaling if self.rotary_width == self.head_dim else None
        rest = {"rope_scaling": scaling, "attention_bias": False, "mlp_bias": False}
        return replace(self, num_layers=num_layers, family="llama", **_LLAMA, **rest)

    def some_layers(self, layers: Sequence[int]) -> DecoderConfig:
        """Return the config of a decoder with only these layers.

        They keep their windows and rotations.
        """
        window, windowed, unrotated = self.sliding_window, self.windowed, self.unrotated
        if window is not None:
            window = replace(window, pattern=tuple(windowed[layer] for layer in layers))
        attention = self.attention
        if any(unrotated):
            attention = replace(attention, unrotated=tuple(unrotated[layer] for layer in layers))
        mixers = _of_layers(self.mixers, layers)
        return replace(
            self,
            num_layers=len(layers),
            sliding_window=window,
            attention=attention,
            recurrence=self.recurrence if "recurrent" in mixers else None,
            mixers=mixers,
            mlps=_of_layers(self.mlps, layers),
        )

    def one_layer(self, *, experts: bool = False) -> DecoderConfig:
        """Return the config of a single layer, for a module that predicts further tokens.

        It has attention, is rotated, and has no sliding window, no soft caps or divisor of logits,
        and no scale or position of embeddings. With `experts` it has the model's experts, otherwise
        an MLP.
        """
        kept = replace(self.experts, num_dense=0) if experts and self.experts else None
        return replace(
            self,
            num_layers=1,
            sliding_window=None,
            attention=replace(self.attention, softcap=None, unrotated=(False,)),
            embedding=Embedding(),
            logit_divisor=1.0,
            logit_softcap=None,
            experts=kept,
            recurrence=None,
            mixers=("attention",),
            mlps=(True,),
        )

    @property
    def unlike_llama(self) -> str | None:
        """The first field whose value no Llama model has, as text `name=value`, or None."""
        for name, default in _LLAMA.items():
            if getattr(self, name) != default:
                return f"{name}={getattr(self, name)}"
        return None


_LLAMA: dict[str, Any] = {
    "norm": Norm(),
    "attention": Attention(),
    "sliding_window": None,
    "mlp": Mlp(),
    "embedding": Embedding(),
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "logit_softcap": None,
    "experts": None,
    "recurrence": None,
    "mixers": ("attention",),
    "mlps": (True,),
}
"""The fields in which families differ, with Llama's values."""


def _over_layers(pattern: tuple[bool, ...], num_layers: int) -> tuple[bool, ...]:
    """Return for each of `num_layers` layers its entry of a pattern that repeats over them."""
    return tuple(_at(pattern, layer) for layer in range(num_layers))


def _at(pattern: tuple[Any, ...], layer: int) -> Any:
    """Return a layer's entry of a pattern that repeats over the layers."""
    return pattern[layer % len(pattern)]


def _of_layers(pattern: tuple[Any, ...], layers: Sequence[int]) -> tuple[Any, ...]:
    """Return the pattern of a decoder with only these layers; one entry if all are equal."""
    entries = tuple(_at(pattern, layer) for layer in layers)
    return entries[:1] if len(set(entries)) == 1 else entries


def _check_unused(ids: tuple[int, ...], vocab_size: int) -> None:
    ascending = all(before < after for before, after in itertools.pairwise(ids))
    if ids and not (ascending and ids[0] >= 0 and ids[-1] < vocab_size and len(ids) < vocab_size):
        raise InputError(
            f"unused_tokens: must be ascending ids below vocab_size={vocab_size}, and not all; "
            "repair the config"
        )


_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "gelu_sigmoid")


def _check_nested(config: DecoderConfig) -> None:
    """Raise InputError if a value of a nested config is out of range."""
    for field, value, choices in (
        ("norm.kind", config.norm.kind, ("rms", "layer")),
        ("norm.offset", config.norm.offset, (0, 1)),
        ("attention.qk_norm_over", config.attention.qk_norm_over, ("head", "projection")),
        ("mlp.activation", config.mlp.activation, _ACTIVATIONS),
        ("mlp.offset", config.mlp.offset, (0, 1)),
    ):
        if value not in choices:
            raise InputError(f"{field}={shown(value)}: use {' or '.join(map(str, choices))}")
    reals = {
        "attention.query_scale": config.attention.query_scale,
        "attention.softcap": config.attention.softcap,
        "mlp.limit": config.mlp.limit,
        "residual_scale": config.residual_scale,
        "logit_divisor": config.logit_divisor,
        "logit_softcap": config.logit_softcap,
        "embedding.scale": config.embedding.scale,
        "recurrence.norm_epsilon": config.recurrence and config.recurrence.norm_epsilon,
    }
    window = config.sliding_window
    if window is not None:
        reals["sliding_window.rope_theta"] = window.rope_theta
        if not 1 <= window.size <= _LARGEST["max_positions"]:
            raise InputError(
                f"sliding_window.size={shown(window.size)}: must be a whole number of at least 1 "
                f"and at most {_LARGEST['max_positions']}; repair the config"
            )
        if not window.pattern:
            raise InputError("sliding_window.pattern is empty: say which layers have the window")
    if not config.attention.unrotated:
        raise InputError("attention.unrotated is empty: say which layers have no rotation")
    for field, value in reals.items():
        if value is not None:
            _check_real(field, value)
    _check_mixers(config)
    if config.attention.latent is not None:
        _check_latent(config.attention.latent, config)
    if config.experts is not None:
        _check_experts(config.experts)
        total = config.num_layers * config.experts.num_experts
        if total > _MOST_EXPERTS:
            raise InputError(
                f"experts.num_experts={config.experts.num_experts}: {config.num_layers} layers "
                f"have {total} in all, at most {_MOST_EXPERTS} are supported; repair the config"
            )


def _check_mixers(config: DecoderConfig) -> None:
    if not config.mixers or set(config.mixers) - {"attention", "recurrent", "absent"}:
        raise InputError(f"mixers={shown(config.mixers)}: use attention, recurrent or absent")
    if not config.mlps or not all(isinstance(has, bool) for has in config.mlps):
        raise InputError(f"mlps={shown(config.mlps)}: say which layers have an MLP")
    with_mlp: dict[Mixer, bool] = {}
    for layer in range(config.num_layers):
        mixer, mlp = _at(config.mixers, layer), _at(config.mlps, layer)
        if mixer == "absent" and not mlp:
            raise InputError(f"mlps: layer {layer} has neither a mixer nor an MLP")
        if with_mlp.setdefault(mixer, mlp) != mlp:
            raise InputError(
                f"mlps: of the layers with mixer={mixer!r} some have an MLP and some have none; "
                "use a model in which they are alike"
            )
    recurrence = config.recurrence
    if ("recurrent" in config.mixers) != (recurrence is not None):
        raise InputError(
            "recurrence: a decoder has one if and only if some of its mixers are recurrent"
        )
    if recurrence is None:
        return
    if recurrence.kind not in ("delta", "mamba2", "conv"):
        raise InputError(f"recurrence.kind={shown(recurrence.kind)}: use delta, mamba2 or conv")
    for field in ("conv_width", "key_heads", "value_heads", "key_width", "value_width"):
        value, highest = getattr(recurrence, field), _LARGEST["intermediate_size"]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
            raise InputError(
                f"recurrence.{field}={shown(value)}: must be a whole number of at least 1 and at "
                f"most {highest}; repair the config"
            )
    if recurrence.value_heads % recurrence.key_heads:
        raise InputError(
            f"recurrence.key_heads={recurrence.key_heads}: must divide "
            f"value_heads={recurrence.value_heads}; repair the config"
        )
    lowest, highest = recurrence.step_limits
    if not 0 <= lowest < highest:
        raise InputError(
            f"recurrence.step_limits={recurrence.step_limits}: must ascend from 0 or more"
        )


def _check_latent(latent: Latent, config: DecoderConfig) -> None:
    width, rotated, most = config.head_dim, config.rotary_width, _LARGEST["hidden_size"]
    for field, value, lowest, highest in (
        ("attention.latent.kv_rank", latent.kv_rank, 1, most),
        ("attention.latent.query_rank", latent.query_rank or 1, 1, most),
        ("attention.latent.value_dim", latent.value_dim, 1, width),
        ("attention.rotary_width", rotated, 2, width - 1),
        ("num_kv_heads", config.num_kv_heads, config.num_heads, config.num_heads),
    ):
        if not lowest <= value <= highest:
            raise InputError(
                f"{field}={shown(value)}: must be a whole number from {lowest} to {highest} with "
                f"latent attention of heads of {width}; repair the config"
            )


def _check_experts(experts: Experts) -> None:
    if experts.router not in ("softmax", "sigmoid"):
        raise InputError(f"experts.router={shown(experts.router)}: use softmax or sigmoid")
    _check_real("experts.scale", experts.scale)
    for field, lowest, highest in (
        ("num_experts", 1, 1 << 12),
        ("groups", 1, experts.num_experts),
        ("groups_per_token", 1, experts.groups),
        ("group_scores", 1, 2),
        ("per_token", 1, experts.num_experts),
        ("intermediate_size", 1, _LARGEST["intermediate_size"]),
        ("shared_size", 0, _LARGEST["intermediate_size"]),
        ("num_dense", 0, MOST_LAYERS),
    ):
        value = getattr(experts, field)
        if not lowest <= value <= highest:
            raise InputError(
                f"experts.{field}={shown(value)}: must be a whole number from {lowest} to "
                f"{highest}; repair the config"
            )
    if experts.shared_gate and not experts.shared_size:
        raise InputError("experts.shared_gate: needs a shared_size of at least 1")
    if experts.num_experts % experts.groups:
        raise InputError(
            f"experts.groups={experts.groups}: must divide num_experts={experts.num_experts}"
        )
    chosen_from = experts.groups_per_token * experts.num_experts // experts.groups
    if experts.per_token > chosen_from:
        raise InputError(
            f"experts.per_token={experts.per_token}: must be at most the {chosen_from} experts of "
            f"groups_per_token={experts.groups_per_token} groups"
        )
    if experts.groups > 1 and experts.num_experts < experts.groups * experts.group_scores:
        raise InputError(
            f"experts.groups={experts.groups}: a group must have at least "
            f"{experts.group_scores} experts, whose scores are compared"
        )


def _check_scaling(scaling: RopeScaling, width: int, theta: float) -> None:
    if scaling.kind not in ("linear", "llama3", "factors", "yarn"):
        raise InputError(f"rope_scaling.kind={scaling.kind!r}: use linear, llama3, factors or yarn")
    positive = {"factor": scaling.factor, "attention_factor": scaling.attention_factor}
    if scaling.kind == "llama3":
        positive["low_freq_factor"] = scaling.low_freq_factor
        positive["original_max_positions"] = scaling.original_max_positions
        positive["high_freq_factor"] = scaling.high_freq_factor
        if not scaling.low_freq_factor < scaling.high_freq_factor:
            raise InputError(
                f"rope_scaling.high_freq_factor={scaling.high_freq_factor}: must exceed "
                f"low_freq_factor={scaling.low_freq_factor}"
            )
    if scaling.kind == "yarn":
        for name in ("original_max_positions", "beta_fast", "beta_slow"):
            positive[name] = getattr(scaling, name)
        if not scaling.beta_slow < scaling.beta_fast:
            raise InputError(
                f"rope_scaling.beta_fast={scaling.beta_fast}: must exceed "
                f"beta_slow={scaling.beta_slow}"
            )
        if theta <= 1:
            raise InputError(f"rope_theta={theta}: must exceed 1 for yarn; repair the config")
    if scaling.kind == "factors":
        sets = {"factors": scaling.factors}
        if scaling.short_factors:
            sets["short_factors"] = scaling.short_factors
            positive["original_max_positions"] = scaling.original_max_positions
        for name, values in sets.items():
            if len(values) != width // 2:
                raise InputError(
                    f"rope_scaling.{name}: {len(values)} entries, must be one for each of "
                    f"the head_dim/2={width // 2} frequencies"
                )
            positive |= {f"{name}[{i}]": value for i, value in enumerate(values)}
    for field, value in positive.items():
        _check_real(f"rope_scaling.{field}", value)


def _check_real(field: str, value: float) -> None:
    if not _SMALLEST_REAL <= value <= _LARGEST_REAL:
        raise InputError(
            f"{field}={shown(value)}: must be a positive number, from {_SMALLEST_REAL:g} to "
            f"{_LARGEST_REAL:g}; repair the config"
        )
