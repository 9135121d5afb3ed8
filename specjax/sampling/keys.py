"""Random keys and noise: the full derivation, from a seed to the noise of one draw.

    row key       key(the request's own seed), else fold_in(key(seed), the prompt's index in the
                  whole input); never the slot of a batch. Of a request's further samples: the
                  first one's key, folded with 2^32 - 1 and then with 1, 2, ...
    coupled       Gumbel noise of fold_in(row key, absolute position), the same for drafter and
                  target
    other rules   fold_in(row key, the row's own round), split into draft, accept and final:
      draft       Gumbel noise of fold_in(draft key, depth); where m drafters share a draft, of
                  fold_in(draft key, m * depth + the drafter's number)
      accept      a uniform of fold_in(accept key, i) for the i-th drafted token
      final       Gumbel noise of fold_in(final key, 0), and for deterministic drafts of
                  fold_in(final key, slot) at each slot

A conversation's later turns, and prompts that are to have a seed of their own, take it from
`derived_seed`. A row's noise depends on its own key and on the index it is asked at, never on the
batch, the length of the draft or the compiled width; with JAX's default key type (threefry) that
holds bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

NoiseAt = Callable[[Any], Float[Array, "B V"]]
"""Gumbel noise of each row at an index (a depth or a slot): one for all rows, or one per row."""


class RoundKeys(NamedTuple):
    """One key per row for each kind of draw in a round of `rejection` or `block`.

    Drawing drafts and the final token with the same key would bias the output.
    """

    draft: Key[Array, "B"]
    accept: Key[Array, "B"]
    final: Key[Array, "B"]


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of turn or prompt `number` derived from the seed of the whole list."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def row_key(seed: int, index: Int[Array, ""] | int, own: int | None = None) -> Key[Array, ""]:
    """Return the key that a row's draws derive from; `own` is the seed of the request, if set."""
    if own is not None:
        return jax.random.key(own)
    return jax.random.fold_in(jax.random.key(seed), index)


def sample_key(row_key: Key[Array, ""], sample: int) -> Key[Array, ""]:
    """Return the row key of sample 0, 1, ... of a request; sample 0 uses `row_key` itself."""
    if not sample:
        return row_key
    # No round and no position has this number, so that nothing else is drawn from these keys.
    return jax.random.fold_in(jax.random.fold_in(row_key, np.uint32(2**32 - 1)), sample)


def fold_round(
    row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]
) -> Key[Array, "B"]:
    """Return each row's key for round `number` (0, 1, ...), which may be one per row."""
    return jax.vmap(jax.random.fold_in)(row_keys, jnp.broadcast_to(number, row_keys.shape))


def split_keys(keys: Key[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of a round; `keys` must have no other use."""
    three_keys = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    return RoundKeys(three_keys[:, 0], three_keys[:, 1], three_keys[:, 2])


def round_keys(row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of round `number`, derived from the row keys."""
    return split_keys(fold_round(row_keys, number))


def position_gumbel(
    row_keys: Key[Array, "B"],
    positions: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "B V"]:
    """Return Gumbel noise of each row at a position; argmax(logp + noise) is a draw from p.

    With a row's own key and absolute positions it is the noise that `coupled` decoding shares with
    plain decoding; with a round's keys and depths it serves the other draws of that round.
    """

    def draw(key: Key[Array, ""], position: Int[Array, ""]) -> Float[Array, "V"]:
        # The default mode truncates the upper tail of float32 noise at about 16.6.
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), dtype, mode="high")

    return jax.vmap(draw)(row_keys, positions)


def coupled_noise(
    row_keys: Key[Array, "B"],
    first: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> NoiseAt:
    """Return the noise of `coupled` by offset from position `first`.

    Draft and target share it.
    """
    return lambda offset: position_gumbel(row_keys, first + offset, vocab, dtype)


def draft_noise(keys: Key[Array, "B"], vocab: int) -> NoiseAt:
    """Return a draft's noise by depth, for the rules other than `coupled`.

    `keys` are the round's keys from `fold_round`.
    """
    draft = split_keys(keys).draft
    return lambda depth: position_gumbel(draft, jnp.broadcast_to(depth, draft.shape), vocab)


def drafter_noise(noise: NoiseAt, number: int, count: int) -> NoiseAt:
    """Return the noise by depth of drafter `number` (0, 1, ...) of `count` that share a draft."""
    return lambda depth: noise(count * depth + number)


def uniforms(
    keys: Key[Array, "B"], count: int, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "B K"]:
    """Return `count` uniforms in [0, 1) per row; the i-th depends on the row's key and i only."""

    def draw(key: Key[Array, ""]) -> Float[Array, "K"]:
        token_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(
            jnp.arange(count, dtype=jnp.uint32)
        )
        return jax.vmap(lambda token_key: jax.random.uniform(token_key, (), dtype))(token_keys)

    return jax.vmap(draw)(keys)
