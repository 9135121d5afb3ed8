"""Keys and noise: who draws what from which key.

A row's noise depends on its own key and on the index it is asked at, never on the batch, the length
of the draft or the compiled width; with JAX's default key type (threefry) that holds bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class RoundKeys(NamedTuple):
    """One key a row for each kind of draw in a round of `rejection` or `block`.

    Drawing drafts and the final token from one key is a bias that real projects have shipped.
    """

    draft: Key[Array, "B"]
    accept: Key[Array, "B"]
    final: Key[Array, "B"]


def split_keys(keys: Key[Array, "B"]) -> RoundKeys:
    """The three keys of a round, from keys that nothing else is drawn from."""
    parts = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    return RoundKeys(parts[:, 0], parts[:, 1], parts[:, 2])


def round_keys(row_keys: Key[Array, "B"], number: Int[Array, ""] | Int[Array, "B"]) -> RoundKeys:
    """The keys of round `number` (0, 1, ...; one for all rows, or one a row)."""
    numbers = jnp.broadcast_to(number, row_keys.shape)
    return split_keys(jax.vmap(jax.random.fold_in)(row_keys, numbers))


def position_gumbel(
    row_keys: Key[Array, "B"],
    positions: Int[Array, "B"],
    vocab: int,
    dtype: jnp.dtype | type = jnp.float32,
) -> Float[Array, "B V"]:
    """Standard Gumbel noise of each row at one position: argmax(logp + noise) is a draw from p.

    With a row's own key and absolute positions it is the noise that `coupled` decoding shares with
    plain decoding; with a round's keys and depths it serves the other draws of that round.
    """

    def draw(key: Key[Array, ""], position: Int[Array, ""]) -> Float[Array, "V"]:
        # The default mode cuts the upper tail of float32 noise at about 16.6.
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), dtype, mode="high")

    return jax.vmap(draw)(row_keys, positions)


def uniforms(
    keys: Key[Array, "B"], count: int, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "B K"]:
    """`count` uniforms in [0, 1) a row; the i-th depends on the row's key and on i alone."""

    def draw(key: Key[Array, ""]) -> Float[Array, "K"]:
        each = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.uint32))
        return jax.vmap(lambda one: jax.random.uniform(one, (), dtype))(each)

    return jax.vmap(draw)(keys)
