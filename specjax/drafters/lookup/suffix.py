"""Suffix decoding: copying what most often followed the longest match of a row's last tokens.

Rule and options are ArcticInference's (Oliaro et al. 2411.04975), applied to the row's own text. An
automaton or a tree of the text would be extended by pointer steps that depend on one another; here
each position has the length of the text that it has in common with the row's end, which one pass
over the row updates per committed token: the matches of any length, and all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import trees
from specjax.distributed.sharding import constrain_rows
from specjax.drafters.base import DRAFT_TOKENS, Accepted, Context, Drafter, Noise
from specjax.drafters.lookup.ngram import copied_tokens
from specjax.fields import Number, Whole, check_instance
from specjax.trees import Draft

_COUNTED = 32
"""The most matches whose continuations are counted, the latest ones."""
_ROUNDING = 1e-6
"""Added to the length that a match allows, so that 0.7 * 10 tokens are 7."""


@dataclass(frozen=True, kw_only=True)
class Suffix(Drafter):
    """A drafter that copies what followed the longest earlier occurrences of a row's last tokens.

    After each token comes the one that followed most of the occurrences which have the draft so
    far, of equally many the latest. The share of them is its estimated probability; a draft ends
    where the product falls below `suffix_decoding_min_token_prob`. A match of l tokens allows
    `suffix_decoding_max_spec_factor` * l + `suffix_decoding_max_spec_offset` tokens, and match and
    draft together at most `suffix_decoding_max_tree_depth`, for which only the end of a longer
    match is counted. The state has 4 bytes per token of a row's capacity. Raises InputError for
    options out of range.
    """

    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = 8
    suffix_decoding_max_tree_depth: Annotated[int, Whole(2, 2048)] = 24
    suffix_decoding_max_spec_factor: Annotated[float, Number(0.0, 1024.0)] = 1.0
    suffix_decoding_max_spec_offset: Annotated[float, Number(-1024.0, 1024.0)] = 0.0
    suffix_decoding_min_token_prob: Annotated[float, Number(0.0, 1.0)] = 0.1

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest draft after a match of 0, 1, ... tokens; the last one for all longer ones."""
        depth = self.suffix_decoding_max_tree_depth
        match = np.arange(1, depth)
        allowed = (
            self.suffix_decoding_max_spec_factor * match + self.suffix_decoding_max_spec_offset
        )
        allowed = np.minimum(np.floor(allowed + _ROUNDING).astype(int), depth - match)
        allowed = np.clip(np.maximum.accumulate(allowed), 0, self.num_speculative_tokens)
        return (0, *allowed.tolist())

    def init(self, params: Any, batch: int, capacity: int) -> Int[Array, "B S"]:
        """Return, per position of empty rows, the length of its match: 0."""
        del params
        return constrain_rows(jnp.zeros((batch, capacity), jnp.int32))

    def propose(
        self, params: Any, state: Int[Array, "B S"], context: Context, noise: Noise
    ) -> tuple[Draft, Int[Array, "B S"]]:
        """Propose the likeliest continuation of the longest match, in rows that have one."""
        del params, noise
        longest = state.max(axis=1)
        is_longest = (state == longest[:, None]) & (state > 0)
        positions = jnp.where(is_longest, jnp.arange(state.shape[1])[None, :], -1)
        ends, _ = lax.top_k(positions, min(_COUNTED, state.shape[1]))
        continuations = copied_tokens(context, jnp.maximum(ends, 0), self.num_speculative_tokens)
        tokens, probabilities = most_frequent(continuations, ends >= 0)
        count = (probabilities >= self.suffix_decoding_min_token_prob).sum(axis=1)
        allowed = jnp.array(self.lengths, jnp.int32)
        allowed = allowed[jnp.minimum(longest, len(self.lengths) - 1)]
        count = jnp.minimum(jnp.minimum(count, allowed), context.limit)
        return trees.chain(tokens, count), state

    def observe(
        self, params: Any, state: Int[Array, "B S"], context: Context, accepted: Accepted
    ) -> Int[Array, "B S"]:
        """Return the lengths of the matches with the row's new end, token by token."""
        del params
        position = jnp.arange(state.shape[1])[None, :]
        first = context.length - accepted.count

        def append(step: Int[Array, ""], matched: Int[Array, "B S"]) -> Int[Array, "B S"]:
            token = accepted.tokens[:, step][:, None]
            # What ends at a position matches the new end if what ended before it matched the old.
            before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
            equal = (context.tokens == token) & (position < (first + step)[:, None])
            longer = jnp.where(equal, before + 1, 0)
            return jnp.where((step < accepted.count)[:, None], longer, matched)

        return lax.fori_loop(0, accepted.count.max(), append, state)


def most_frequent(
    continuations: Int[Array, "B m K"], known: Bool[Array, "B m"]
) -> tuple[Int[Array, "B K"], Float[Array, "B K"]]:
    """Return the path of most frequent tokens and, per token, the path's estimated probability.

    Of the m continuations of a row those that are `known` count; of equally frequent tokens the
    one of the first continuation is taken. Without any, probabilities are 0.
    """

    def extend(
        path: tuple[Bool[Array, "B m"], Float[Array, "B"]], following: Int[Array, "B m"]
    ) -> tuple[Any, Any]:
        agreeing, probability = path
        same = (following[:, :, None] == following[:, None, :]) & agreeing[:, None, :]
        frequency = jnp.where(agreeing, same.sum(axis=2), 0)
        best = jnp.argmax(frequency, axis=1)[:, None]
        token = jnp.take_along_axis(following, best, axis=1)
        share = frequency.max(axis=1) / jnp.maximum(agreeing.sum(axis=1), 1)
        path = agreeing & (following == token), probability * share
        return path, (token[:, 0], path[1])

    start = known, jnp.ones(len(known), jnp.float32)
    _, (tokens, probabilities) = lax.scan(extend, start, jnp.moveaxis(continuations, 2, 0))
    return tokens.T, probabilities.T
