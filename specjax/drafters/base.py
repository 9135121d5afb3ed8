"""What a drafter is: three pure functions and a few static fields, as optax has two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache
from specjax.distributed.sharding import constrain
from specjax.models.interface import LanguageModel
from specjax.sampling import WarpFlags, argmax, warp
from specjax.trees import Draft

Noise = Callable[[Int[Array, ""] | int], Float[Array, "B V"]]
"""Gumbel noise for the draft at depth 0, 1, ...; under `coupled` it is the target's own."""


@struct.dataclass
class Sampling:
    """Each row's warp."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


@struct.dataclass
class Context:
    """What a drafter may look at: committed tokens, and the target as it stands.

    `tokens[b, :length[b]]` are row b's committed tokens (n of them), prompt included; `cache` holds
    the keys and values of the first n - 1. `limit` is the longest draft each row may make in this
    round, at most `num_tokens` (K) and 0 in rows that are finished. `index` is the index of a row's
    prompt in the whole input.
    """

    tokens: Int[Array, "B M"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]
    index: Int[Array, "B"]
    sampling: Sampling
    cache: KVCache
    params: Any
    target: LanguageModel = struct.field(pytree_node=False)
    flags: WarpFlags = struct.field(pytree_node=False)
    num_tokens: int = struct.field(pytree_node=False)
    needs_logq: bool = struct.field(pytree_node=False)
    """Whether the rule reads q, so that a draft that was sampled must bring its distributions."""

    def token_at(self, position: Int[Array, "B"]) -> Int[Array, "B"]:
        """Each row's committed token at a position; positions below 0 give the first token."""
        position = jnp.maximum(position, 0)[:, None]
        return jnp.take_along_axis(self.tokens, position, axis=1)[:, 0]

    def warp(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Log-probabilities under each row's sampling parameters, whole on each device."""
        return warp_rows(constrain(logits, "batch", None), self.sampling, self.flags)

    def draw(
        self, logits: Float[Array, "B V"], noise: Noise, depth: Int[Array, ""] | int
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """One token per row, and the log-probabilities it was drawn from (else the logits)."""
        if not self.flags.sampled:
            return argmax(logits), logits
        distribution = self.warp(logits)
        return argmax(distribution + noise(depth)), distribution


def warp_rows(
    logits: Float[Array, "B V"], sampling: Sampling, flags: WarpFlags
) -> Float[Array, "B V"]:
    """`sampling.warp` with the parameters of each row."""
    return warp(
        logits,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        flags=flags,
    )


@struct.dataclass
class Accepted:
    """What a round committed: `count` tokens a row, the last of them the target's own.

    `path_slots` are the window slots of the accepted nodes, -1 after them; `features` hold the
    target's named features at the root and at those nodes.
    """

    path_slots: Int[Array, "B P"]
    tokens: Int[Array, "B P+1"]
    count: Int[Array, "B"]
    features: dict[str, Float[Array, "B P+1 D"]]


@dataclass(frozen=True)
class Drafter:
    """A drafter: how it starts, what it proposes, how it follows what was accepted.

    `init(params, context, features) -> state` runs after the prompt's prefill; `features` maps each
    name asked for to [B, S, D], defined at positions 0..n-2. `propose(params, state, context,
    noise) -> (Draft, state)` proposes up to `context.num_tokens` nodes, of which no row may have
    more valid ones than `context.limit`. `observe(params, state, context, accepted) -> state`
    follows the commit; its context is the one after it. All three are traced and draw no keys.

    Whether a node is proposed may depend on committed tokens, on its ancestors and on the
    distribution it will be drawn from, never on its own token, unless nodes are deterministic.
    """

    name: str
    init: Callable[[Any, Context, dict[str, Float[Array, "B S D"]]], Any]
    propose: Callable[[Any, Any, Context, Noise], tuple[Draft, Any]]
    observe: Callable[[Any, Any, Context, Accepted], Any]
    num_speculative_tokens: int
    """K where the caller asks for none."""
    params: Any = field(default=None, compare=False)
    features: tuple[str, ...] = ()
    sampled: bool = False
    """Whether nodes are drawn from distributions (sampled rows) rather than chosen."""
    lengths: tuple[int, ...] = ()
    """Drafts shorter than the longest that are worth a compiled width of their own."""
    follows_own_drafts: bool = False
    """Whether `observe` only knows what to do with drafts that this drafter's `propose` made."""


def stateless(params: Any, context: Context, features: dict) -> tuple[()]:
    """`init` of a drafter that remembers nothing."""
    del params, context, features
    return ()


def unmoved(params: Any, state: Any, context: Context, accepted: Accepted) -> Any:
    """`observe` of a drafter whose state does not follow the tokens."""
    del params, context, accepted
    return state
