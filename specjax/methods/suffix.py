"""Suffix decoding: copying the most frequent continuation of the longest match of the last tokens.

The algorithm and its options are those of ArcticInference (Oliaro et al. 2411.04975), applied to
the row's own text: a chain of the most frequent tokens, or a tree. A suffix tree would be extended
by dependent pointer steps. Here each position stores instead how many tokens up to it equal the
last tokens of the row. One pass over the row per committed token updates these lengths, from which
all matches of any length follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax import trees
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Accepted, Context, Drafter, Noise
from specjax.core.growth.dynamic_tree import Candidates, best_nodes
from specjax.core.growth.tree_options import TREE, TreeOptions
from specjax.distributed.sharding import constrain_rows
from specjax.errors import InputError
from specjax.fields import Number, Whole, check_instance, optional
from specjax.methods.method import Method, VllmMethod
from specjax.methods.ngram import copied_tokens
from specjax.trees import Draft, DynamicTree, RankedTree

MOST_MATCHES = 32
"""The most occurrences of a match whose continuations are counted: here the latest ones."""
_ROUNDING = 1e-6
"""A number added to the length that a match allows before rounding down, so that 0.7 * 10 is 7."""
_USUAL_LENGTH = 8
"""The longest draft if neither its length nor a tree is specified."""


@dataclass(frozen=True, kw_only=True)
class Suffix(Drafter):
    """A drafter that copies continuations of the longest earlier matches of a row's last tokens.

    After each token it drafts the token that followed most of the matches that contain the draft so
    far, and of equally frequent ones the latest. The estimated probability of a draft is the
    fraction of all matches that contain it; the draft ends before this falls below
    `suffix_decoding_min_token_prob`. A match of l tokens allows `suffix_decoding_max_spec_factor` *
    l + `suffix_decoding_max_spec_offset` draft tokens. Match and draft together have at most
    `suffix_decoding_max_tree_depth` tokens; of a longer match only the end counts. A `tree` (a
    `DynamicTree`, or a `TreeOptions`, which is converted to one) has the most probable nodes, as
    many as the match allows, with at most `topk` after each. The state takes 4 bytes per token of a
    row's capacity. Raises InputError for options out of range, a static tree, a tree with fewer
    levels than requested tokens, and one with too many nodes.
    """

    num_speculative_tokens: Annotated[int, optional(DRAFT_TOKENS)] = None  # as __post_init__ says
    tree: Annotated[DynamicTree | RankedTree | TreeOptions | None, TREE] = None
    suffix_decoding_max_tree_depth: Annotated[int, Whole(2, 2048)] = 24
    """The most tokens of match and draft together."""
    suffix_decoding_max_spec_factor: Annotated[float, Number(0.0, 1024.0)] = 1.0
    """How many tokens are drafted per token of the match."""
    suffix_decoding_max_spec_offset: Annotated[float, Number(-1024.0, 1024.0)] = 0.0
    """The number of tokens that is added to this; below 0, short matches draft nothing."""
    suffix_decoding_min_token_prob: Annotated[float, Number(0.0, 1.0)] = 0.1
    """A draft ends before its probability, estimated from counts, falls below this."""

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")
        tree, length = self.tree, self.num_speculative_tokens
        if isinstance(tree, TreeOptions):
            tree = tree.shape(length)
            object.__setattr__(self, "tree", tree)
        if isinstance(tree, RankedTree):
            raise InputError(f"tree.kind=static: {self.name} counts its trees anew; use dynamic")
        if length is None:
            length = _USUAL_LENGTH if tree is None else tree.depth
            object.__setattr__(self, "num_speculative_tokens", length)
        if tree is not None and length > tree.depth:
            raise InputError(
                f"num_speculative_tokens={length}: the tree has {tree.depth} levels; leave it out, "
                "or use a deeper tree"
            )
        if self.num_nodes > (most := MOST_MATCHES * length):
            raise InputError(
                f"tree.num_nodes={self.num_nodes}: {MOST_MATCHES} matches of {length} tokens have "
                f"at most {most}; lower it"
            )

    @property
    def shape(self) -> DynamicTree | None:
        """The sizes of the tree, limited to `num_speculative_tokens`, or None for a chain."""
        return None if self.tree is None else self.tree.limited(self.num_speculative_tokens)

    @property
    def num_nodes(self) -> int:
        """The maximum number of nodes of the tree, or of tokens of the chain."""
        return self.num_speculative_tokens if self.tree is None else self.shape.num_nodes

    @property
    def branches(self) -> bool:
        """Whether drafts are trees."""
        return self.tree is not None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The most nodes allowed after a match of 0, 1, ... tokens; the last entry repeats."""
        depth = self.suffix_decoding_max_tree_depth
        match = np.arange(1, depth)
        allowed = (
            self.suffix_decoding_max_spec_factor * match + self.suffix_decoding_max_spec_offset
        )
        allowed = np.minimum(np.floor(allowed + _ROUNDING).astype(int), depth - match)
        allowed = np.clip(np.maximum.accumulate(allowed), 0, self.num_nodes)
        return (0, *allowed.tolist())

    def init(self, params: Any, batch: int, capacity: int) -> Int[Array, "B S"]:
        """Return the match length at each position of empty rows, which is 0."""
        del params
        return constrain_rows(jnp.zeros((batch, capacity), jnp.int32))

    def propose(
        self, params: Any, state: Int[Array, "B S"], context: Context, noise: Noise
    ) -> tuple[Draft, Int[Array, "B S"]]:
        """Propose the most likely continuations of the longest match, in rows that have one."""
        del params, noise
        longest = state.max(axis=1)
        is_longest = (state == longest[:, None]) & (state > 0)
        positions = jnp.where(is_longest, jnp.arange(state.shape[1])[None, :], -1)
        positions = jnp.pad(positions, ((0, 0), (0, MOST_MATCHES)), constant_values=-1)
        ends, _ = lax.top_k(positions, MOST_MATCHES)
        continuations = copied_tokens(context, jnp.maximum(ends, 0), self.num_speculative_tokens)
        topk = 1 if self.tree is None else self.tree.topk
        levels = counted(continuations, ends >= 0, topk, self.suffix_decoding_min_token_prob)
        allowed = jnp.array(self.lengths, jnp.int32)
        allowed = allowed[jnp.minimum(longest, len(self.lengths) - 1)]
        if self.tree is None:
            best = jnp.argmax(levels.value, axis=2)[:, :, None]
            tokens = jnp.take_along_axis(levels.tokens, best, axis=2)[:, :, 0].T
            count = jnp.isfinite(levels.value).any(axis=2).sum(axis=0)
            return trees.chain(
                tokens, jnp.minimum(jnp.minimum(count, allowed), context.limit)
            ), state
        each = [Candidates(*(part[depth] for part in levels)) for depth in range(len(levels.value))]
        draft = best_nodes(self.shape, each, context)
        is_allowed = jnp.arange(self.num_nodes)[None, :] < allowed[:, None]
        return draft.replace(valid=draft.valid & is_allowed), state

    def observe(
        self, params: Any, state: Int[Array, "B S"], context: Context, accepted: Accepted
    ) -> Int[Array, "B S"]:
        """Return the match lengths at all positions, updated for the new end of each row."""
        del params
        position = jnp.arange(state.shape[1])[None, :]
        first = context.length - accepted.count

        def append(step: Int[Array, ""], matched: Int[Array, "B S"]) -> Int[Array, "B S"]:
            token = accepted.tokens[:, step][:, None]
            # A suffix at a position matches the new end if the one before it matched the old end.
            before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
            equal = (context.tokens == token) & (position < (first + step)[:, None])
            longer = jnp.where(equal, before + 1, 0)
            return jnp.where((step < accepted.count)[:, None], longer, matched)

        return lax.fori_loop(0, accepted.count.max(), append, state)


def counted(
    continuations: Int[Array, "B m K"], known: Bool[Array, "B m"], topk: int, least: float
) -> Candidates:
    """Return the candidates after each token in the continuations of each row's matches.

    Each row has m `continuations` of K tokens, of which the `known` ones count. The result's arrays
    are [K, B, m], with the candidates of each depth. The value of a candidate is the fraction of
    known continuations that contain its path; of identical paths, the first has the candidate.
    Values are at least `least`, and each token is followed by the `topk` most frequent candidates,
    the first ones among equals.
    """
    index = jnp.arange(known.shape[1])
    is_earlier = jnp.tril(jnp.ones((1, len(index), len(index)), bool), -1)
    total = jnp.maximum(known.sum(axis=1), 1)[:, None]

    def extend(siblings: Bool[Array, "B m m"], following: tuple[Any, Any]) -> tuple[Any, Any]:
        number, tokens = following
        alike = siblings & (tokens[:, :, None] == tokens[:, None, :])
        first, count = jnp.argmax(alike, axis=2), alike.sum(axis=2)
        value = jnp.where(first == index[None, :], count / total, 0.0)
        better = value[:, None, :] > value[:, :, None]
        better |= (value[:, None, :] == value[:, :, None]) & is_earlier
        kept = (value > 0) & (value >= least) & ((siblings & better).sum(axis=2) < topk)
        parent = jnp.argmax(siblings, axis=2)
        candidates = Candidates(
            jnp.where(kept, value, -jnp.inf),
            tokens,
            jnp.where(number > 0, len(index) * (number - 1) + parent, -1),
        )
        return alike & jnp.take_along_axis(kept, first, axis=1)[:, :, None], candidates

    alike = known[:, :, None] & known[:, None, :]
    by_depth = jnp.arange(continuations.shape[2]), jnp.moveaxis(continuations, 2, 0)
    return lax.scan(extend, alike, by_depth)[1]


SUFFIX = Method(
    name="suffix",
    paper="2411.04975",
    drafter=Suffix,
    vllm=VllmMethod(
        keys={
            "suffix_decoding_max_spec_factor": None,
            "suffix_decoding_max_tree_depth": None,
            "suffix_decoding_min_token_prob": None,
        },
        length_key="suffix_decoding_max_tree_depth",
        options=dict,
    ),
)
