"""The base class of drafters: a frozen value with three pure functions and separate arrays."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from specjax.core.cache import KVCache
from specjax.core.language_model import LanguageModel
from specjax.core.parameter_sizes import count_weights, is_quantized, weights_in_words
from specjax.core.processor import Processor
from specjax.distributed.sharding import constrain
from specjax.errors import InputError, shown
from specjax.sampling import SeparateNoise, SharedNoise, WarpFlags, argmax, warp
from specjax.trees import Draft

OWN_DRAFTER = (
    "subclass specjax.Drafter as a frozen dataclass with a method propose(self, params, state, "
    "context, noise) -> (Draft, state), and pass an instance, or LoadedDrafter(instance, params)"
)
"""Advice on writing a drafter, for error messages."""
Noise = SharedNoise | SeparateNoise
"""A function (depth, parents=None) that returns Gumbel noise for the draws at a depth (0, 1, ...).

`noise(depth)` [B, V] is for chains; in a tree, `noise(depth, parents)` [B, T, V] is for the
children of T nodes, which `parents` [T] number. Under `coupled` it is the target's noise.
"""


@struct.dataclass
class Sampling:
    """The sampling parameters of each row, as arrays: those of `SamplingParams` that shape p."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


@struct.dataclass
class StepLimits:
    """How much each drafter may draft in the rounds of a step; set before the step begins.

    `longest` is the number of tokens of a chain, or of a tree's first nodes; a drafter with 0 does
    not run. A drafter that drafts token by token stops if the most likely next token has a
    probability below `confidence`. A pass has at least `least_width` slots, whatever is drafted:
    this is for measuring what passes cost. Unused slots then have different tokens, as a draft has,
    and rows decode nonsense where a pass resumes that of a drafter.
    """

    longest: Int[Array | np.ndarray, "drafters"]
    confidence: Float[Array | np.ndarray, "drafters"]
    least_width: Int[Array | np.ndarray | np.generic, ""] = np.int32(1)


@struct.dataclass
class Context:
    """The values that a drafter may read: committed tokens, and the state of the target.

    `tokens[b, :length[b]]` are the n committed tokens of row b, of which the first
    `prompt_length[b]` are the prompt; `cache` has the keys and values of the first n - 1. `limit`
    is the longest path that each row may draft in this round: at most the drafter's
    `num_speculative_tokens`, and 0 in finished rows. `index` is the index of a row's prompt in the
    whole input. `features[name][b, t % M]` is the target's feature at position t, for at most the
    last M positions before n - 1; read it with `feature_from`. A drafter that drafts token by token
    stops if the most likely next token has a probability below `least_confidence`.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]
    index: Int[Array, "B"]
    sampling: Sampling
    cache: KVCache
    params: Any
    features: dict[str, Float[Array, "B M D"]]
    target: LanguageModel = struct.field(pytree_node=False)
    flags: WarpFlags = struct.field(pytree_node=False)
    needs_logq: bool = struct.field(pytree_node=False)
    """Whether the rule reads q, so that a sampled draft must have its distributions."""
    longest_commit: int = struct.field(pytree_node=False)
    """The most tokens that a round commits per row."""
    full_drafts: bool = struct.field(pytree_node=False, default=False)
    """Whether drafters run for their full length in each round, and `limit` only truncates."""
    least_confidence: Float[Array, ""] | float = 0.0
    resumes: bool = struct.field(pytree_node=False, default=False)
    """Whether verification resumes the pass of a draft that has a `PartialPass`."""
    processors: tuple[Processor, ...] = struct.field(pytree_node=False, default=())
    """What changes the target's logits."""
    processor_states: tuple[Any, ...] = ()
    """The states of the processors after the committed tokens."""

    def token_at(self, position: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return each row's committed token at `position`; its first token if that is negative."""
        position = jnp.maximum(position, 0)[:, None]
        return jnp.take_along_axis(self.tokens, position, axis=1)[:, 0]

    def tokens_from(self, first: Int[Array, "B"], count: int) -> Int[Array, "B T"]:
        """Return `count` tokens of each row from position `first` on; 0 outside of its tokens."""
        positions = first[:, None] + jnp.arange(count)[None, :]
        tokens = jnp.take_along_axis(self.tokens, positions, axis=1, mode="fill", fill_value=0)
        return jnp.where((positions >= 0) & (positions < self.length[:, None]), tokens, 0)

    def feature_from(self, name: str, first: Int[Array, "B"], count: int) -> Float[Array, "B T D"]:
        """Return the feature `name` at `count` positions of each row, from `first` on.

        The decoding loop must still hold the feature at these positions.
        """
        kept = self.features[name]
        slots = (first[:, None] + jnp.arange(count)[None, :]) % kept.shape[1]
        return jnp.take_along_axis(kept, slots[:, :, None], axis=1)

    def warp(self, logits: Float[Array, "B *slots V"]) -> Float[Array, "B *slots V"]:
        """Return the log-probabilities of `logits` under the sampling parameters of each row."""
        return warp_rows(logits, self.sampling, self.flags)

    def draw(
        self, logits: Float[Array, "B V"], noise: Noise, depth: Int[Array, ""] | int
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """Draw one token per row; return it and the log-probabilities it was drawn from.

        `noise` gives the noise for the draw at `depth`. If no row is sampled, return the most
        likely token and the logits.
        """
        if not self.flags.sampled:
            return argmax(logits), logits
        distribution = self.warp(logits)
        return argmax(distribution + noise(depth)), distribution


def warp_rows(
    logits: Float[Array, "B *slots V"], sampling: Sampling, flags: WarpFlags
) -> Float[Array, "B *slots V"]:
    """Return the log-probabilities of `logits` under the sampling parameters of each row.

    `flags` say which parameters some row may use, as for `sampling.warp`. On a mesh each device
    computes its part of the vocabulary and draws from it, and only sums and maxima are exchanged.
    The thresholds of top-k and top-p would take sixteen exchanges that depend on one another; then
    the rows are gathered instead.
    """
    slots = logits.shape[1:-1]
    if flags.top_k or flags.top_p:
        logits = constrain(logits, "batch", *[None] * len(slots), None)

    def every(parameter: Array) -> Array:
        return jnp.broadcast_to(parameter.reshape(-1, *[1] * len(slots)), logits.shape[:-1])

    return warp(
        logits,
        every(sampling.temperature),
        every(sampling.top_k),
        every(sampling.top_p),
        every(sampling.min_p),
        flags=flags,
    )


@struct.dataclass
class Accepted:
    """The tokens to observe, of a prompt or of rounds: the last `count[b]` tokens of row b.

    `features[name][b, i]` is the feature of the position before `tokens[b, i]`, so that a drafter
    that reads pairs (x_{t+1}, f_t) finds both at the same index.
    """

    tokens: Int[Array, "B T"]
    count: Int[Array, "B"]
    features: dict[str, Float[Array, "B T D"]]


@struct.dataclass
class TargetPass:
    """One pass of the target: over a chunk of a prompt, or over a round's root and draft.

    `parents` are the indices of the preceding tokens; the entry of the first token is 0. Entries
    that are not `computed` (slots without a node, finished rows, positions after a prompt) are
    arbitrary. Drafted tokens are included whether accepted or not.
    """

    tokens: Int[Array, "B T"]
    parents: Int[Array, "B T"]
    computed: Bool[Array, "B T"]
    features: dict[str, Shaped[Array, "B T _"]]

    def child(self, indices: Int[Array, "B C"], tokens: Int[Array, "B C"]) -> Int[Array, "B C"]:
        """Return, for each of `indices`, the index of the entry after it with the token `tokens`.

        The result is -1 if no computed entry has it. This finds a draft's nodes even if they were
        merged with those of another draft.
        """
        is_node = self.computed & (jnp.arange(self.tokens.shape[1]) > 0)[None, :]
        matches = is_node[:, None, :] & (self.parents[:, None, :] == indices[:, :, None])
        matches &= self.tokens[:, None, :] == tokens[:, :, None]
        return jnp.where(matches.any(axis=2), jnp.argmax(matches, axis=2), -1)


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """The base class of drafters; subclass it as a frozen dataclass with static configuration.

    Arrays are separate: `params`, as in `LoadedDrafter`, and a state, each leaf of which has rows
    as its first axis or belongs to a `KVCache` or a `Window`. `init`, `propose`, `observe` and, if
    implemented, `observe_pass` are traced and derive no keys. Equal drafters share one compiled
    program.
    """

    num_speculative_tokens: int = 4
    """K: the longest path of a draft."""

    def __new__(cls, *arguments: Any, **fields: Any) -> Drafter:
        """Raise InputError for `Drafter(...)` itself, and for fields without `@dataclass`."""
        if cls is Drafter:
            raise InputError(f"Drafter{shown(arguments)}: a drafter is a value; {OWN_DRAFTER}")
        for kind in cls.__mro__[: cls.__mro__.index(Drafter)]:
            own = [
                name
                for name, hint in inspect.get_annotations(kind).items()
                if "ClassVar" not in str(hint)
            ]
            own += ["__init__"] * ("__init__" in vars(kind))
            # Drafters that differ in such a field only would be equal, and share a program.
            if issubclass(kind, Drafter) and own and "__dataclass_fields__" not in vars(kind):
                raise InputError(
                    f"{kind.__name__}: {', '.join(own)} without @dataclass, so that its fields "
                    "would be ignored; put @dataclass(frozen=True, kw_only=True) before the class"
                )
        return super().__new__(cls)

    @property
    def name(self) -> str:
        """The name in messages and reports; a subclass may define it as an attribute instead."""
        return type(self).__name__.lower()

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N) of every draft; in trees it may exceed the longest path."""
        return self.num_speculative_tokens

    @property
    def branches(self) -> bool:
        """Whether drafts are trees, in which a token may have several successors."""
        return self.num_nodes != self.num_speculative_tokens

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that `observe` reads, or `propose` from `context`.

        Those of a prompt's tokens are only for `observe`.
        """
        return ()

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The names of the target's features that `observe_pass` reads."""
        return ()

    @property
    def sampled(self) -> bool:
        """Whether nodes of sampled rows are drawn from distributions rather than chosen."""
        return False

    @property
    def max_positions(self) -> int | None:
        """The number of positions of a row in which the drafter can draft; None for all of them.

        A row drafts no token at this position or after it, while the target continues.
        """
        return None

    @property
    def stops(self) -> bool:
        """Whether `propose` drafts token by token and applies `context.least_confidence`."""
        return False

    @property
    def observes(self) -> bool:
        """Whether `observe` is implemented, so that a state follows the committed tokens."""
        return type(self).observe is not Drafter.observe

    @property
    def following_tokens(self) -> int | None:
        """How many later tokens the cached entries of a position depend on.

        It is None if the state of a prompt is not complete unless all its tokens are observed. If
        it is a number, requests may share the caches of a prefix: a prompt is then observed from
        some position on, up to which the caches are filled, and has at least one token after it.
        """
        observes = self.observes or type(self).observe_pass is not Drafter.observe_pass
        return None if observes else 0

    def longest_paths(self, context: Context) -> Int[Array, "B"]:
        """Return the longest path that each row may draft with this drafter.

        It is `context.limit`, if neither `num_speculative_tokens` nor `max_positions` is reached.
        """
        limit = jnp.minimum(context.limit, self.num_speculative_tokens)
        positions = self.max_positions
        # No row of a call has more tokens than there is space for.
        if positions is None or positions >= context.tokens.shape[1]:
            return limit
        return jnp.minimum(limit, jnp.maximum(positions - context.length, 0))

    @property
    def max_cached_requests(self) -> int:
        """The number of an engine's latest outputs that `with_outputs` may keep; 0 for none."""
        return 0

    def with_outputs(
        self, params: Any, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> Any:
        """Return `params` with an engine's latest outputs in place of earlier ones.

        `outputs` are pairs of the prompt and the output of a request, the latest one last. Shapes
        and dtypes of `params` do not change.
        """
        del outputs
        return params

    def text_digests(self, params: Any) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the `sampling.text_digest` of each text in `params` that drafts are copied from.

        Such a text may contain what an earlier request with the same seed and prompt has emitted,
        as may those on which parameters were trained, which have a `sampling.array_digest`. Rounds
        then draw with other noise than that request did; otherwise a draft would know the draws
        that verify it. Prompts, and texts that no output stands in, are not included.
        """
        del params
        return ()

    def with_new_digests(self, params: Any, before: Any) -> Any:
        """Return `params` with `text_digests` that differ from all earlier ones.

        `before` are the parameters that these replace.
        """
        del before
        return params

    def for_target(self, params: Any, target_params: Any) -> Any:
        """Return `params` with the arrays shared with the target taken from `target_params`."""
        del target_params
        return params

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """Return the state of `batch` empty rows with a capacity of `capacity` tokens."""
        del params, batch, capacity
        return ()

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Return a draft after each row's last token, and the new state.

        `noise` gives the noise for draws, by depth and, in trees, by parent. No path may be longer
        than `context.limit`. Whether a node is proposed may depend on committed tokens, its
        ancestors, and the distribution that it will be drawn from, but never on its own token,
        unless the node is deterministic.
        """
        raise NotImplementedError

    def observe(self, params: Any, state: Any, context: Context, accepted: Accepted) -> Any:
        """Return the state after further committed tokens, which `context` already includes.

        A prompt is observed in chunks, starting with its second token (the first is in
        `context.tokens`). Later calls have the tokens committed by one or several rounds, whichever
        drafter drafted them. The state of a prompt may depend on its tokens and features only,
        since requests with the same prompt share it.
        """
        del params, context, accepted
        return state

    def observe_pass(self, params: Any, state: Any, target_pass: TargetPass) -> Any:
        """Return the state after a pass of the target, for drafters with `pass_features`.

        This is called after each chunk of a prompt and in each round, whichever drafter drafted,
        before `observe` is called with the committed tokens.
        """
        del params, target_pass
        return state


class LoadedDrafter(NamedTuple):
    """A drafter together with its parameters, which is what `make_drafter` returns."""

    drafter: Drafter
    params: Any = ()

    @property
    def name(self) -> str:
        """The name of the drafter."""
        return self.drafter.name

    def own_bytes(self, target_params: Any) -> int:
        """Return the size in bytes of the parameters, without those that are the target's.

        Copies of the target's, such as the columns of its output head for a draft vocabulary, are
        not counted either.
        """
        known = set(map(id, jax.tree.leaves(target_params)))
        return sum(
            leaf.nbytes
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.params)
            if jax.tree_util.DictKey("shared") not in path and id(leaf) not in known
        )

    def __repr__(self) -> str:
        """Return the drafter, and the number and the form of its parameters.

        Those that trained heads share with their target are not counted.
        """
        leaves = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.params, is_leaf=is_quantized)
            if jax.tree_util.DictKey("shared") not in path and hasattr(leaf, "size")
        ]
        weights = f", {weights_in_words(leaves)}" if leaves else ""
        count = f"{count_weights(leaves) / 1e6:.1f}M parameters"
        return f"LoadedDrafter({self.drafter.name}, {count}{weights})"
