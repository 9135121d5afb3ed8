"""Lookahead decoding: n-grams that the target generates in parallel (Fu et al. 2402.02057).

A window holds guesses for future positions in W columns of N - 1 rows; the guess in row r and
column c is for the position c + r after the root. The first row is a chain after the root, and the
rest of each column is a chain after its first guess, so that the window is a token tree, computed
and verified like any other. The target's most likely token after a column completes an n-gram of N
tokens and becomes the column's next guess (a Jacobi step); the first row is dropped. The n-grams
are stored in a pool, and those that begin with the root are drafted as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax import trees
from specjax.core.cache import put
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Accepted, Context, Drafter, Noise, TargetPass
from specjax.core.top_tokens import feature_name
from specjax.distributed.sharding import constrain_rows
from specjax.errors import InputError
from specjax.fields import Whole, check_instance, optional
from specjax.methods.method import Method
from specjax.trees import Draft, Topology

_UNKNOWN = -1
_SEARCHED = 4
"""The number of n-grams that are searched for each one drafted, since some are duplicates."""


@struct.dataclass
class LookaheadState:
    """The window of guesses for rows of `length` tokens, and the pool of n-grams.

    A guess that is not known yet is -1; the entry for the root's own position is unused. `count`
    n-grams were written to the pool so far; each has N tokens, one more than the window has rows,
    and number i is stored at index i modulo M.
    """

    window: Int[Array, "B rows columns"]
    length: Int[Array, "B"]
    pool: Int[Array, "B M n"]
    count: Int[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class Lookahead(Drafter):
    """A drafter that copies n-grams of guesses, which the target improves in the same passes.

    `window` is W, `levels` N, and `guesses` the maximum number of n-grams per draft; with 2 levels
    and no guesses it is Jacobi decoding. The pool holds the latest `pool_size` (M) n-grams,
    including those of the text, and takes 4 * M * N bytes per row. A draft has (N - 1) * (W +
    guesses) - 1 nodes before duplicates are removed. The longest path is W + N - 3; a smaller
    `num_speculative_tokens` reduces W, then N. Nodes are deterministic. Raises InputError for
    invalid options.
    """

    num_speculative_tokens: Annotated[int, optional(DRAFT_TOKENS)] = None  # as __post_init__ says
    window: Annotated[int, Whole(2, 64)] = 7
    """The number of columns of guesses (W)."""
    levels: Annotated[int, Whole(2, 16)] = 5
    """The number of tokens of an n-gram (N)."""
    guesses: Annotated[int, Whole(0, 64)] = 7
    """The most n-grams of a draft."""
    pool_size: Annotated[int, Whole(64, 1 << 20)] = 2048
    """How many n-grams are kept; the oldest are dropped."""

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")
        longest, length = self.window + self.levels - 3, self.num_speculative_tokens
        if length is None:
            object.__setattr__(self, "num_speculative_tokens", longest)
        elif length > longest:
            raise InputError(
                f"num_speculative_tokens={length}: with window={self.window} and "
                f"levels={self.levels} the longest path is {longest}; lower it, or raise window"
            )

    @property
    def rows(self) -> int:
        """The number of rows of the window (N - 1), at most the longest path."""
        return min(self.levels - 1, max(self.num_speculative_tokens, 1))

    @property
    def columns(self) -> int:
        """The number of columns of the window (W) for a longest path of K tokens."""
        return self.num_speculative_tokens - self.rows + 2

    @property
    def num_nodes(self) -> int:
        """The number of nodes: those of the window and of n-grams, both without the root."""
        if not self.num_speculative_tokens:
            return 0
        return self.rows * (self.columns + self.guesses) - 1

    @property
    def observes(self) -> bool:
        """Whether n-grams are drafted, so that those of the text must be observed."""
        return self.guesses > 0

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The name of the target's feature that improves the guesses."""
        return (feature_name(1),)

    def init(self, params: Any, batch: int, capacity: int) -> LookaheadState:
        """Return a window of unknown guesses and an empty pool, for each row."""
        del params, capacity
        zeros = jnp.zeros(batch, jnp.int32)
        window = jnp.full((batch, self.rows, self.columns), _UNKNOWN, jnp.int32)
        pool = jnp.full((batch, self.pool_size, self.rows + 1), _UNKNOWN, jnp.int32)
        return constrain_rows(LookaheadState(window, zeros, pool, zeros))

    def propose(
        self, params: Any, state: LookaheadState, context: Context, noise: Noise
    ) -> tuple[Draft, LookaheadState]:
        """Propose the window, and the latest n-grams that begin with the last token."""
        del params, noise
        window = moved(state.window, context, context.length - state.length)
        state = state.replace(window=window, length=context.length)
        guesses = window.reshape(len(window), -1)[:, 1:]
        if self.rows == 1 and not self.guesses:
            return trees.chain(guesses, context.limit), state
        exists, row = jnp.ones(guesses.shape, bool), jnp.full(guesses.shape, -1)
        # The guess of row r and column c is in slot r * W + c; its parent is to its left or above.
        shape = Topology((*range(self.columns - 1), *range((self.rows - 1) * self.columns)))
        tree = Draft(guesses, exists, row, None, shape)
        draft = trees.merge(*self._drafted_ngrams(state, context), tree)
        within = draft.topology.row_depths[:, 1:] <= context.limit[:, None]
        return draft.replace(valid=draft.valid & within), state

    def observe(
        self, params: Any, state: LookaheadState, context: Context, accepted: Accepted
    ) -> LookaheadState:
        """Return the state with the n-grams that end at new tokens."""
        del params
        before, steps = self.rows, accepted.tokens.shape[1]
        first = context.length - accepted.count
        tokens = context.tokens_from(first - before, before + steps)
        ngrams = [tokens[:, start : start + steps] for start in range(before + 1)]
        step = jnp.arange(steps)[None, :]
        known = (step < accepted.count[:, None]) & (first[:, None] + step >= before)
        return added(state, jnp.stack(ngrams, axis=2), known)

    def observe_pass(
        self, params: Any, state: LookaheadState, target_pass: TargetPass
    ) -> LookaheadState:
        """Return the state after a pass of the target.

        If the pass computed the window, the target's most likely tokens become its guesses.
        """
        del params
        window = state.window
        first_row = [jnp.zeros((len(window), 1), jnp.int32)]
        for column in range(1, self.columns):
            first_row.append(target_pass.child(first_row[-1], window[:, :1, column]))
        slots = jnp.concatenate(first_row, axis=1)
        for row in range(1, self.rows):
            slots = target_pass.child(slots, window[:, row])
        computed = (slots >= 0).all(axis=1)
        best = target_pass.features[feature_name(1)][:, :, 0]
        following = jnp.take_along_axis(best, jnp.maximum(slots, 0), axis=1)[:, None]
        ngrams = jnp.concatenate([window.at[:, 0, 0].set(target_pass.tokens[:, 0]), following], 1)
        known = jnp.broadcast_to(computed[:, None], slots.shape)
        state = added(state, ngrams.swapaxes(1, 2), known)
        after = jnp.concatenate([window[:, 1:], following], axis=1)
        window = jnp.where(computed[:, None, None], after, window)
        return state.replace(window=window, length=state.length + computed)

    def _drafted_ngrams(self, state: LookaheadState, context: Context) -> list[Draft]:
        """Return the latest distinct n-grams that begin with the root, as chains without it."""
        root, size, most = context.token_at(context.length - 1), self.pool_size, self.guesses
        recency = 1 + (jnp.arange(size)[None, :] - state.count[:, None]) % size
        recency = jnp.where(state.pool[:, :, 0] == root[:, None], recency, 0)
        recency, index = lax.top_k(recency, min(_SEARCHED * most, size))
        ngrams = jnp.take_along_axis(state.pool[:, :, 1:], index[:, :, None], axis=1)
        equal = (ngrams[:, :, None] == ngrams[:, None, :]).all(axis=3)
        known = (recency > 0) & ~jnp.tril(equal, -1).any(axis=2)
        order = jnp.argsort(~known, axis=1, stable=True)[:, :most]
        ngrams = jnp.take_along_axis(ngrams, order[:, :, None], axis=1)
        count = jnp.where(jnp.take_along_axis(known, order, axis=1), self.rows, 0)
        return [trees.chain(ngrams[:, i], count[:, i]) for i in range(most)]


def moved(
    window: Int[Array, "B rows columns"], context: Context, count: Int[Array, "B"]
) -> Int[Array, "B rows columns"]:
    """Return the window of guesses after the text has grown by `count` tokens.

    Guesses that are not known are replaced by tokens from pseudo-random positions of the row.
    """
    rows, columns = window.shape[1:]
    index = (jnp.arange(columns)[None, :] + count[:, None])[:, None, :]
    window = jnp.take_along_axis(window, index, axis=2, mode="fill", fill_value=_UNKNOWN)
    entry, length = jnp.arange(rows * columns), context.length[:, None].astype(jnp.uint32)
    mixed = (entry.astype(jnp.uint32)[None, :] + length) * jnp.uint32(2654435761)
    positions = ((mixed >> 8) % length).astype(jnp.int32)
    tokens = jnp.take_along_axis(context.tokens, positions, axis=1)
    return jnp.where(window == _UNKNOWN, tokens.reshape(window.shape), window)


def added(
    state: LookaheadState, ngrams: Int[Array, "B T n"], known: Bool[Array, "B T"]
) -> LookaheadState:
    """Return the state with those of the n-grams that are `known` added to the pool, in order."""
    size = state.pool.shape[1]
    number = jnp.cumsum(known, axis=1)
    known = known & (number > number[:, -1:] - size)
    place = jnp.where(known, (state.count[:, None] + number - 1) % size, size)
    return state.replace(pool=put(state.pool, place, ngrams), count=state.count + number[:, -1])


LOOKAHEAD = Method(name="lookahead", paper="2402.02057", drafter=Lookahead)
