"""Random keys and noise: how the noise of every draw is derived from a seed.

    row key       key(the request's seed) if the request has one, else fold_in(key(seed), the
                  prompt's index in the whole input); never the row's slot in a batch. Further
                  samples of a request: the first sample's key, folded with 2^32 - 1 and then
                  with 1, 2, ...
    coupled       Gumbel noise of fold_in(row key, absolute position), the same for drafter and
                  target
    other rules   fold_in(row key, the number of the row's round), split into draft, accept, final:
      draft       Gumbel noise of fold_in(draft key, depth); if m drafters share a draft, of
                  fold_in(draft key, m * depth + the drafter's number)
      accept      a uniform of fold_in(accept key, i) for the i-th drafted token
      final       Gumbel noise of fold_in(final key, 0), and for deterministic drafts of
                  fold_in(final key, slot) at each slot

The later turns of a conversation, and prompts that need separate seeds, get them from
`derived_seed`. A row's noise depends only on the row's key and on the index in the table above,
never on the batch, the draft length or the compiled width; with JAX's default keys (threefry) this
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
"""A function from a depth or slot, one for all rows or one per row, to each row's Gumbel noise."""


class RoundKeys(NamedTuple):
    """One key per row for each kind of draw in a round of `rejection` or `block`.

    Drawing drafts and the final token with the same key would bias the output.
    """

    draft: Key[Array, "B"]
    accept: Key[Array, "B"]
    final: Key[Array, "B"]


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of conversation turn or prompt `number`, derived from the common `seed`."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def row_key(seed: int, index: Int[Array, ""] | int, own: int | None = None) -> Key[Array, ""]:
    """Return the key from which all draws of a row derive.

    `index` is the index of the row's prompt in the whole input. `own`, the seed that a request
    specifies for itself, takes precedence over `seed` and `index`.
    """
    if own is not None:
        return jax.random.key(own)
    return jax.random.fold_in(jax.random.key(seed), index)


def sample_key(row_key: Key[Array, ""], sample: int) -> Key[Array, ""]:
    """Return the row key of sample 0, 1, ... of a request; sample 0 uses `row_key` unchanged."""
    if not sample:
        return row_key
    # No round and no position has this number, so that nothing else is drawn from these keys.
    return jax.random.fold_in(jax.random.fold_in(row_key, np.uint32(2**32 - 1)), sample)


def fold_round(
    row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]
) -> Key[Array, "B"]:
    """Return each row's key for round `number` (0, 1, ...), a scalar or one number per row."""
    return jax.vmap(jax.random.fold_in)(row_keys, jnp.broadcast_to(number, row_keys.shape))


def split_keys(keys: Key[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of a round, split from `keys`.

    Do not use `keys` for anything else.
    """
    three_keys = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    return RoundKeys(three_keys[:, 0], three_keys[:, 1], three_keys[:, 2])


def round_keys(row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]) -> RoundKeys:
    """Return the draft, accept and final keys of each row for round `number` (0, 1, ...)."""
    return split_keys(fold_round(row_keys, number))


def position_gumbel(
    row_keys: Key[Array, "B"],
    positions: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "B V"]:
    """Return Gumbel noise for one position per row; argmax(logp + noise) is a draw from p.

    Given row keys and absolute positions, this is the noise that `coupled` decoding shares with
    plain decoding; given a round's keys and depths, it serves the other draws of that round.
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
    """Return a function from an offset to the noise of `coupled` at position `first` + offset.

    Drafter and target use the same noise.
    """
    return lambda offset: position_gumbel(row_keys, first + offset, vocab, dtype)


def draft_noise(keys: Key[Array, "B"], vocab: int) -> NoiseAt:
    """Return a function from a depth to the noise for drafting there under `rejection` or `block`.

    `keys` are the round's keys, as returned by `fold_round`.
    """
    draft = split_keys(keys).draft
    return lambda depth: position_gumbel(draft, jnp.broadcast_to(depth, draft.shape), vocab)


def drafter_noise(noise: NoiseAt, number: int, count: int) -> NoiseAt:
    """Return the noise by depth for one of several drafters that share a draft.

    `noise` is the noise by depth of the round, `number` (0, 1, ...) identifies the drafter, and
    `count` is the number of drafters.
    """
    return lambda depth: noise(count * depth + number)


def uniforms(
    keys: Key[Array, "B"], count: int, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "B K"]:
    """Return `count` uniforms in [0, 1) per row; the i-th depends only on the row's key and i."""

    def draw(key: Key[Array, ""]) -> Float[Array, "K"]:
        token_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(
            jnp.arange(count, dtype=jnp.uint32)
        )
        return jax.vmap(lambda token_key: jax.random.uniform(token_key, (), dtype))(token_keys)

    return jax.vmap(draw)(keys)
