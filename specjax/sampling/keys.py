"""Random keys and noise: the whole derivation, from a seed to the noise of one draw.

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

    Drawing drafts and the final token from one key is a bias that real projects have shipped.
    """

    draft: Key[Array, "B"]
    accept: Key[Array, "B"]
    final: Key[Array, "B"]


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of turn or prompt `number` of a conversation or list that has a seed."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def row_key(seed: int, index: Int[Array, ""] | int, own: int | None = None) -> Key[Array, ""]:
    """Return the key from which all draws of a row are derived; `own` is the request's own seed."""
    if own is not None:
        return jax.random.key(own)
    return jax.random.fold_in(jax.random.key(seed), index)


def sample_key(row_key: Key[Array, ""], sample: int) -> Key[Array, ""]:
    """Return the row key of a request's sample 0, 1, ...; sample 0 uses the request's own key."""
    if not sample:
        return row_key
    # No round and no position has this number, so that nothing else is drawn from these keys.
    return jax.random.fold_in(jax.random.fold_in(row_key, np.uint32(2**32 - 1)), sample)


def fold_round(
    row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]
) -> Key[Array, "B"]:
    """Return each row's key for round `number` (0, 1, ...; one for all rows, or one per row)."""
    return jax.vmap(jax.random.fold_in)(row_keys, jnp.broadcast_to(number, row_keys.shape))


def split_keys(keys: Key[Array, "B"]) -> RoundKeys:
    """Return the three keys of a round, split from keys that are used for nothing else."""
    three_keys = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    return RoundKeys(three_keys[:, 0], three_keys[:, 1], three_keys[:, 2])


def round_keys(row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]) -> RoundKeys:
    """Return the three keys of round `number`, derived from the row keys."""
    return split_keys(fold_round(row_keys, number))


def position_gumbel(
    row_keys: Key[Array, "B"],
    positions: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "B V"]:
    """Return each row's standard Gumbel noise at a position: argmax(logp + noise) is drawn from p.

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
    """Return the noise of `coupled`, as a function of the number of tokens after `first`.

    Drafts and target share it.
    """
    return lambda offset: position_gumbel(row_keys, first + offset, vocab, dtype)


def draft_noise(keys: Key[Array, "B"], vocab: int) -> NoiseAt:
    """Return the noise of a draft by depth, under the other rules; `keys` are from `fold_round`."""
    draft = split_keys(keys).draft
    return lambda depth: position_gumbel(draft, jnp.broadcast_to(depth, draft.shape), vocab)


def drafter_noise(noise: NoiseAt, number: int, count: int) -> NoiseAt:
    """Return the noise by depth for drafter `number` (0, 1, ...) of `count` that share a draft."""
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
