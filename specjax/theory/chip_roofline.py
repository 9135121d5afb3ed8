"""Memory and minimum pass times of a model on a chip, and the resulting speed-up (roofline)."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool

from specjax.errors import InputError, shown
from specjax.theory.argument_checks import (
    Count,
    Real,
    Result,
    check_broadcast,
    checked,
    checked_count,
    unwrap,
)
from specjax.theory.expected_speedup import expected_tokens, least_alpha
from specjax.theory.expert_use import ExpertUse


def stored_bits(bits: Real, *, group: Count, numbers: Count = 1, number_bits: Count = 32) -> Result:
    """Return the stored bits per weight, including its share of the scales of its group.

    The result is `bits` + `numbers` * `number_bits` / `group`: each `group` of weights shares
    `numbers` numbers (a scale and, possibly, a minimum) of `number_bits` bits. For example, 4 bits
    in groups of 32 with both in float32 take 6; 8 bits with a scale take 9, or little more than 8
    with one scale per output.
    """
    check_broadcast(bits=bits, group=group, numbers=numbers, number_bits=number_bits)
    shared = np.asarray(checked_count("numbers", numbers, 0)) * checked_count(
        "number_bits", number_bits, 1
    )
    return unwrap(checked("bits", bits, above=True) + shared / checked_count("group", group, 1))


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """The sizes of a mixture of experts, which replaces the MLP after the first `num_dense` layers.

    Each token uses `per_token` of `num_experts` (E) gated MLPs of width `intermediate_size`, and a
    shared one of width `shared_size` if that is not 0. `use` says how often each expert is used;
    without it loads are even, and tokens independent.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    shared_size: int = 0
    num_dense: int = 0
    use: ExpertUse | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:-1]:
            least = 0 if field.name in ("shared_size", "num_dense") else 1
            checked_count(field.name, getattr(self, field.name), least)
        if self.per_token > self.num_experts:
            raise InputError(
                f"per_token = {self.per_token}: give at most num_experts = {self.num_experts}"
            )
        if not isinstance(self.use, ExpertUse | None):
            raise InputError(f"use = {shown(self.use)}: give an ExpertUse, or None")
        if self.use is not None and self.use.share.shape[1] != self.num_experts:
            raise InputError(
                f"use: it counts {self.use.share.shape[1]} experts; give one of"
                f" num_experts = {self.num_experts}"
            )

    def distinct(self, tokens: Count, rows: Count = 1) -> Result:
        """Return the expected number of experts per layer that `tokens` tokens of each row use.

        This is `use.distinct`, or without `use` that of independent tokens, E (1 - (1 - per_token /
        E)^(tokens rows)). Consecutive tokens of a text use fewer.
        """
        if self.use is not None:
            return self.use.distinct(tokens, rows)
        check_broadcast(tokens=tokens, rows=rows)
        tokens = np.asarray(checked_count("tokens", tokens, 0), np.float64)
        missed = (1.0 - self.per_token / self.num_experts) ** (
            tokens * checked_count("rows", rows, 0)
        )
        return unwrap(self.num_experts * (1.0 - missed))


_STATE_BYTES = 4
_STATE_MOVES = 3


@dataclasses.dataclass(frozen=True)
class RecurrentShape:
    """The sizes of `num_layers` layers that have a recurrent state in place of attention.

    The state has a matrix [N, P] for each of H heads, in float32, which share G keys, and the last
    inputs of a convolution over `conv_width` tokens. A layer computes `num_rates` numbers per head
    beside queries, keys, values and gates: 2 in the gated delta rule, 1 in Mamba-2.
    """

    num_layers: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_width: int = 4
    num_rates: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked_count(field.name, getattr(self, field.name), 1)

    @property
    def channels(self) -> int:
        """The number of inputs of a layer's convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def state_elements(self) -> int:
        """Return how many numbers the states of all layers have per row, at any length."""
        matrix = self.value_heads * self.key_width * self.value_width
        return self.num_layers * (matrix + (self.conv_width - 1) * self.channels)

    def slot_elements(self) -> int:
        """Return how many numbers a window stores per slot: inputs, keys, values and decays."""
        values = self.value_heads * (self.value_width + 1)
        return self.num_layers * (self.channels + self.key_heads * self.key_width + values)

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of parameters in all layers' products, at a model width."""
        inner = self.value_heads * self.value_width
        outputs = self.channels + inner + self.num_rates * self.value_heads
        return self.num_layers * hidden_size * (outputs + inner)

    def moved_bytes(self) -> int:
        """Return the bytes of states that a pass moves per row, whatever it drafts.

        They are read for the pass, and read and written when its tokens are committed.
        """
        return _STATE_MOVES * _STATE_BYTES * self.state_elements()

    def flops(self) -> int:
        """Return the operations per token on the matrices: what query and key read, and the update.

        In Mamba-2 keys read nothing, which makes it two thirds.
        """
        return 6 * self.num_layers * self.value_heads * self.key_width * self.value_width


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs or experts, RMS norms, and no biases.

    `num_windowed` layers attend to the last `window` tokens only; of the `num_layers` those of
    `recurrent` have no attention. `mtp_module` marks the shape of a
    multi-token prediction module, which projects two vectors to one and shares the embedding and
    head of another model.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    experts: ExpertShape | None = None
    recurrent: RecurrentShape | None = None
    window: int | None = None
    num_windowed: int = 0
    mtp_module: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            checked_count(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_kv_heads = {self.num_kv_heads}: give a divisor of num_heads"
                f" = {self.num_heads}"
            )
        if not isinstance(self.recurrent, RecurrentShape | None):
            raise InputError(f"recurrent = {shown(self.recurrent)}: give a RecurrentShape, or None")
        if self.num_attention < 1:
            raise InputError(
                f"recurrent: {self.recurrent.num_layers} layers; give fewer than num_layers"
                f" = {self.num_layers}"
            )
        if not 0 <= self.num_windowed <= self.num_attention:
            raise InputError(
                f"num_windowed = {self.num_windowed}: give 0 to the {self.num_attention} layers"
                " with attention"
            )
        if (self.window is not None) != (self.num_windowed > 0):
            raise InputError(
                f"window = {self.window}, num_windowed = {self.num_windowed}: give both or neither"
            )
        if self.window is not None:
            checked_count("window", self.window, 1)
        if not isinstance(self.experts, ExpertShape | None):
            raise InputError(f"experts = {shown(self.experts)}: give an ExpertShape, or None")

    @property
    def num_attention(self) -> int:
        """The number of layers with attention."""
        return self.num_layers - (self.recurrent.num_layers if self.recurrent else 0)

    def mtp(self) -> ModelShape:
        """Return the shape of a multi-token prediction module with a layer like the last one."""
        experts = self.experts and dataclasses.replace(self.experts, num_dense=0)
        return dataclasses.replace(
            self,
            num_layers=1,
            experts=experts,
            recurrent=None,
            window=None,
            num_windowed=0,
            mtp_module=True,
        )

    def num_params(self) -> int:
        """Return the number of parameters, counting a tied embedding once.

        The parameters that a multi-token prediction module shares with another model are not
        counted.
        """
        head = self.vocab_size * self.hidden_size
        tables = 0 if self.mtp_module else head * (1 if self.tie_word_embeddings else 2)
        every = self.experts.num_experts if self.experts else 0
        return int(self._weights(every)) + self._norms() + tables

    def num_read_params(self, tokens: Count = 1, rows: Count = 1) -> Result:
        """Return the number of parameters read by a pass over `tokens` tokens of each row.

        These are all parameters except an untied input embedding, which is indexed, and unused
        experts (`ExpertShape.distinct`).
        """
        used = self.experts.distinct(tokens, rows) if self.experts else 0
        return self._weights(used) + self._norms() + self.vocab_size * self.hidden_size

    def num_matmul_params(self) -> int:
        """Return the number of weights that take part in the matrix products of one token.

        These are the weights of the projections, of the MLP or the active experts, and of the head.
        """
        used = self.experts.per_token if self.experts else 0
        return int(self._weights(used)) + self.vocab_size * self.hidden_size

    def kv_elements(self) -> int:
        """Return how many numbers the cache stores per token: keys and values, 2 L G C in all.

        L counts the layers with attention.
        """
        return 2 * self.num_attention * self.num_kv_heads * self.head_dim

    def seen_tokens(self, context: Real) -> Result:
        """Return how many of `context` tokens a layer with attention attends to, on average."""
        context = np.asarray(context, np.float64)
        if self.window is None:
            return unwrap(context)
        share = self.num_windowed / self.num_attention
        return unwrap((1 - share) * context + share * np.minimum(context, self.window))

    def _norms(self) -> int:
        """Return the number of parameters of all norms.

        There are two norms per layer, the final one, and two more for the inputs of an MTP module.
        """
        return (2 * self.num_layers + 1 + 2 * self.mtp_module) * self.hidden_size

    def _weights(self, used_experts: Result) -> Result:
        """Return the number of parameters of projections and MLPs.

        `used_experts` is the number of experts to count in each layer with experts; it may be
        fractional.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        dense = self.num_layers
        weights = self.num_attention * attention
        if self.recurrent is not None:
            weights += self.recurrent.num_weights(self.hidden_size)
        if self.experts is not None:
            dense = min(self.experts.num_dense, self.num_layers)
            mlp_width = used_experts * self.experts.intermediate_size + self.experts.shared_size
            expert_layer = self.hidden_size * (self.experts.num_experts + 3 * mlp_width)
            weights = weights + (self.num_layers - dense) * expert_layer
        weights = weights + dense * 3 * self.hidden_size * self.intermediate_size
        return weights + (2 * self.hidden_size**2 if self.mtp_module else 0)


_SIZES = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The device memory that a deployment needs, by purpose, in bytes."""

    target_weights: Count
    draft_weights: Count
    target_cache: Count
    draft_cache: Count
    windows: Count
    logits: Count

    @property
    def total(self) -> Count:
        """The sum of all fields, in bytes."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


def memory(
    target: ModelShape,
    *,
    batch: Count,
    capacity: Count,
    num_nodes: Count = 0,
    draft: ModelShape | None = None,
    num_distributions: Count = 0,
    weight_itemsize: Count = 2,
    cache_itemsize: Count = 2,
    logit_itemsize: Count = 4,
    weight_bits: Real | None = None,
    draft_weight_bits: Real | None = None,
) -> Memory:
    """Return the memory that speculative decoding needs during a round, without activations.

    It consists of the weights of the target and of `draft`; for each of them a cache of 2 L G C S B
    numbers (S = `capacity`, B = `batch`) and a window of W = `num_nodes` + 1 slots; logits [B, W,
    V]; and draft distributions [B, Q, V] (Q = `num_distributions`, 0 for deterministic drafts). For
    plain decoding, omit nodes, draft and distributions. Item sizes are in bytes per number.
    `weight_bits`, the mean bits per weight (`stored_bits`), overrides `weight_itemsize`;
    `draft_weight_bits` does the same for `draft`, and is `weight_bits` by default.
    """
    _check_shape("target", target)
    if draft is not None:
        _check_shape("draft", draft)
    check_broadcast(
        batch=batch,
        capacity=capacity,
        num_nodes=num_nodes,
        num_distributions=num_distributions,
        weight_itemsize=weight_itemsize,
        cache_itemsize=cache_itemsize,
        logit_itemsize=logit_itemsize,
        weight_bits=weight_bits,
        draft_weight_bits=draft_weight_bits,
    )
    batch = checked_count("batch", batch, 1)
    capacity = checked_count("capacity", capacity, 1)
    num_nodes = checked_count("num_nodes", num_nodes, 0)
    num_distributions = checked_count("num_distributions", num_distributions, 0)
    bits = _weight_bits(weight_bits, checked_count("weight_itemsize", weight_itemsize, 1))
    draft_bits = _draft_bits(draft_weight_bits, bits)
    cache_itemsize = checked_count("cache_itemsize", cache_itemsize, 1)
    logit_itemsize = checked_count("logit_itemsize", logit_itemsize, 1)
    target_slot = batch * target.kv_elements() * cache_itemsize
    draft_slot = batch * draft.kv_elements() * cache_itemsize if draft else 0
    window, of_states, of_slots = num_nodes + 1, 0, 0
    if (recurrent := target.recurrent) is not None:
        of_states = batch * recurrent.state_elements() * _STATE_BYTES
        of_slots = batch * recurrent.slot_elements() * _STATE_BYTES
    return Memory(
        target_weights=_whole_bytes(target.num_params(), bits),
        draft_weights=_whole_bytes(draft.num_params(), draft_bits) if draft else 0,
        target_cache=capacity * target_slot + of_states,
        draft_cache=capacity * draft_slot,
        windows=window * (target_slot + draft_slot + of_slots),
        logits=batch * (window + num_distributions) * target.vocab_size * logit_itemsize,
    )


def _weight_bits(weight_bits: Real | None, itemsize: Count) -> Real:
    return 8 * itemsize if weight_bits is None else checked("weight_bits", weight_bits, above=True)


def _draft_bits(draft_weight_bits: Real | None, bits: Real) -> Real:
    if draft_weight_bits is None:
        return bits
    return checked("draft_weight_bits", draft_weight_bits, above=True)


def _whole_bytes(num_params: int, bits: Real) -> Count:
    num_bytes = np.ceil(num_params * np.asarray(bits) / 8).astype(np.int64)
    return num_bytes if num_bytes.ndim else int(num_bytes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator: peak dense bf16 FLOP/s, memory bandwidth in bytes/s, memory in bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory"):
            checked(name, getattr(self, name), above=True)

    def times(self, num_chips: int) -> Chip:
        """Return `num_chips` chips as one, as for a model split over them without communication."""
        checked_count("num_chips", num_chips, 1)
        sums = {name: num_chips * getattr(self, name) for name in ("flops", "bandwidth", "memory")}
        return Chip(f"{num_chips} x {self.name}", **sums)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100-80g", 312e12, 2.039e12, 80e9),
        Chip("h100-sxm", 989e12, 3.35e12, 80e9),
        Chip("h200", 989e12, 4.8e12, 141e9),
        Chip("tpu-v5e", 197e12, 819e9, 16e9),
        Chip("tpu-v5p", 459e12, 2.765e12, 95e9),
        Chip("tpu-v6e", 918e12, 1.6e12, 32e9),
    )
}
"""Chips by name, from their vendors' data sheets: NVIDIA SXM modules and Google Cloud TPUs."""


def weight_bytes(
    shape: ModelShape,
    *,
    tokens: Count = 1,
    rows: Count = 1,
    itemsize: Count = 2,
    weight_bits: Real | None = None,
) -> Result:
    """Return the bytes of weights that a pass over `tokens` tokens of each of `rows` rows reads.

    It is `ModelShape.num_read_params` times the bytes of a weight, so it leaves out an untied input
    embedding and unused experts; keys and values come on top. Times passes per second it is the
    bandwidth that decoding achieves. `weight_bits`, the mean bits per weight (`stored_bits`),
    overrides `itemsize`, which is in bytes.
    """
    _check_shape("shape", shape)
    check_broadcast(tokens=tokens, rows=rows, itemsize=itemsize, weight_bits=weight_bits)
    bits = np.asarray(_weight_bits(weight_bits, checked_count("itemsize", itemsize, 1)))
    tokens, rows = checked_count("tokens", tokens, 1), checked_count("rows", rows, 1)
    return unwrap(shape.num_read_params(tokens, rows) * bits / 8)


def pass_seconds(
    shape: ModelShape,
    chip: Chip | str,
    *,
    tokens: Count,
    batch: Count,
    context: Count,
    itemsize: Count = 2,
    weight_bits: Real | None = None,
) -> Result:
    """Return the minimum time in seconds of one pass over `tokens` new tokens per row.

    It is max(bytes / bandwidth, FLOPs / peak), assuming perfect overlap (Williams et al. 2009,
    "Roofline"). Bytes: all weights once, but only the experts used; keys and values of `context`
    tokens per row, or of the window in windowed layers; new keys and values; the states of
    recurrent layers (`RecurrentShape.moved_bytes`). FLOPs: 2 per matmul weight and token, 4 L H C
    per attended token, with causal attention among new tokens, and those of recurrent layers.
    `itemsize` is that of weights and cache, in bytes; `weight_bits`, the mean bits per weight
    (`stored_bits`), overrides it for weights. Products are computed in bf16 whatever the bits.
    """
    _check_shape("shape", shape)
    chip = _chip(chip)
    check_broadcast(
        tokens=tokens, batch=batch, context=context, itemsize=itemsize, weight_bits=weight_bits
    )
    tokens = np.asarray(checked_count("tokens", tokens, 1))
    batch = np.asarray(checked_count("batch", batch, 1))
    context = np.asarray(checked_count("context", context, 0))
    itemsize = checked_count("itemsize", itemsize, 1)
    read_bytes = np.asarray(
        weight_bytes(shape, tokens=tokens, rows=batch, itemsize=itemsize, weight_bits=weight_bits)
    )
    tokens, batch = tokens.astype(np.float64), batch.astype(np.float64)
    seen_tokens = np.asarray(shape.seen_tokens(context))
    cache_bytes = batch * shape.kv_elements() * (seen_tokens + tokens) * itemsize
    pairs = tokens * (seen_tokens + (tokens + 1.0) / 2.0)
    per_pair = 4 * shape.num_attention * shape.num_heads * shape.head_dim
    flops = batch * (2.0 * tokens * shape.num_matmul_params() + pairs * per_pair)
    moved_bytes = read_bytes + cache_bytes
    if shape.recurrent is not None:
        moved_bytes = moved_bytes + batch * shape.recurrent.moved_bytes()
        flops = flops + batch * tokens * shape.recurrent.flops()
    return unwrap(np.maximum(moved_bytes / chip.bandwidth, flops / chip.flops))


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Speculative and plain decoding at the chip's limits; the fields are floats or arrays.

    Times are in seconds: of a plain pass, of drafting in one round, and of the round's verify pass.
    `fits` says whether weights, caches and logits fit into memory; where it is false, ignore the
    other fields. `break_even_alpha` is the least alpha at which a round is no slower than plain
    decoding, inf if there is none.
    """

    plain_seconds: Result
    draft_seconds: Result
    verify_seconds: Result
    tokens_per_round: Result
    plain_tokens_per_second: Result
    tokens_per_second: Result
    speedup: Result
    break_even_alpha: Result
    fits: bool | Bool[np.ndarray, "..."]


def roofline(
    shape: ModelShape,
    chip: Chip | str,
    batch: Count,
    context: Count,
    k: Count,
    alpha: Real,
    *,
    draft_cost: Real | ModelShape = 0.0,
    itemsize: Count = 2,
    weight_bits: Real | None = None,
    draft_weight_bits: Real | None = None,
) -> Roofline:
    """Return the speed-up of k draft tokens per round on a chip, by batch size and context.

    `context` is the number of committed tokens per row. `draft_cost` is the time of a draft step as
    a fraction of a plain target pass, or the shape of a draft model, whose k one-token passes are
    timed on the same chip. `itemsize` and the bits of weights are as in `pass_seconds`; for a
    target that drafts with fewer bits itself, pass `draft_cost=shape` and `draft_weight_bits`. All
    numbers broadcast: `roofline(shape, "h100-sxm", batch[:, None], context[None], 4, 0.8)` is a
    table. Results in tokens/s are totals over rows. For several chips, pass
    `CHIPS[name].times(num_chips)`.
    """
    _check_shape("shape", shape)
    chip = _chip(chip)
    check_broadcast(
        batch=batch,
        context=context,
        k=k,
        alpha=alpha,
        draft_cost=draft_cost,
        itemsize=itemsize,
        weight_bits=weight_bits,
        draft_weight_bits=draft_weight_bits,
    )
    k = checked_count("k", k, 0)
    context = checked_count("context", context, 0)
    bits = _weight_bits(weight_bits, checked_count("itemsize", itemsize, 1))
    draft_bits = _draft_bits(draft_weight_bits, bits)
    deployment = {"batch": batch, "context": context, "itemsize": itemsize}
    target = {**deployment, "weight_bits": bits}
    plain = np.asarray(pass_seconds(shape, chip, tokens=1, **target))
    verify = np.asarray(pass_seconds(shape, chip, tokens=k + 1, **target))
    draft = draft_cost if isinstance(draft_cost, ModelShape) else None
    if draft is None:
        step = checked("draft_cost", draft_cost) * plain
    else:
        step = np.asarray(pass_seconds(draft, chip, tokens=1, weight_bits=draft_bits, **deployment))
    round_seconds = k * step + verify
    tokens = np.asarray(expected_tokens(alpha, k))
    needed_memory = memory(
        shape,
        batch=batch,
        capacity=context + k + 1,
        num_nodes=k,
        draft=draft,
        num_distributions=k if draft else 0,
        cache_itemsize=itemsize,
        weight_bits=bits,
        draft_weight_bits=draft_bits,
    )
    fits = np.asarray(needed_memory.total <= chip.memory)
    return Roofline(
        plain_seconds=unwrap(plain),
        draft_seconds=unwrap(k * step),
        verify_seconds=unwrap(verify),
        tokens_per_round=unwrap(tokens),
        plain_tokens_per_second=unwrap(batch / plain),
        tokens_per_second=unwrap(batch * tokens / round_seconds),
        speedup=unwrap(tokens * plain / round_seconds),
        break_even_alpha=unwrap(least_alpha(round_seconds / plain, k)),
        fits=fits if fits.ndim else bool(fits),
    )


def _chip(chip: Chip | str) -> Chip:
    if isinstance(chip, Chip):
        return chip
    if not isinstance(chip, str) or chip not in CHIPS:
        raise InputError(f"chip = {shown(chip)}: give a Chip or one of {', '.join(CHIPS)}")
    return CHIPS[chip]


def _check_shape(name: str, shape: ModelShape) -> None:
    if not isinstance(shape, ModelShape):
        raise InputError(
            f"{name} = {shown(shape)}: give a ModelShape, the sizes of a model, "
            "such as theory.MODELS['llama-3.1-8b']"
        )
