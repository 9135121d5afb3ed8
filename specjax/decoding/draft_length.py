"""How many tokens a row may draft in a round: fixed, by batch size, or by past acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

_MEMORY = 0.95
"""How much of its weight an observation keeps from one round to the next."""
_PRIOR_TESTED, _PRIOR_ACCEPTED = 4.0, 2.8
"""What an unobserved row is taken to have seen: 70 % accepted, at a weight of four tokens."""


@struct.dataclass
class History:
    """Decayed counts of draft tokens that were tested, and of those that were accepted."""

    tested: Float[Array, "B"]
    passed: Float[Array, "B"]


def no_history(batch: int) -> History:
    """A history without observations."""
    return History(jnp.zeros(batch), jnp.zeros(batch))


def remember(history: History, depth: Int[Array, "B"], accepted: Int[Array, "B"]) -> History:
    """The history after a round; a round without a draft lets it fade towards the prior.

    Of a path of `depth` nodes the accepted ones passed and one more, if there was one, failed.
    """
    tested = jnp.minimum(accepted + 1, depth)
    return History(
        history.tested * _MEMORY + tested.astype(jnp.float32),
        history.passed * _MEMORY + accepted.astype(jnp.float32),
    )


@dataclass(frozen=True)
class DraftLength:
    """The draft length of each row, from committed tokens alone, so that output stays exact.

    At most `max_tokens` (K). `by_batch` holds (low, high, k): with low..high unfinished rows, k.
    `costs`, if given, are the seconds of a round that drafts 0..K tokens; then each row drafts the
    length that its history makes fastest: argmax_k E[tokens | k] / costs[k].
    """

    max_tokens: int
    by_batch: tuple[tuple[int, int, int], ...] = ()
    costs: tuple[float, ...] = ()

    def limit(self, history: History, active: Bool[Array, "B"]) -> Int[Array, "B"]:
        """The longest draft each row may make now; 0 for finished rows."""
        limit = jnp.full(active.shape, self.max_tokens, jnp.int32)
        if self.costs:
            tested = history.tested + _PRIOR_TESTED
            alpha = (history.passed + _PRIOR_ACCEPTED) / tested
            powers = alpha[:, None] ** np.arange(self.max_tokens + 1)[None, :]
            rate = jnp.cumsum(powers, axis=1) / np.asarray(self.costs, np.float32)[None, :]
            limit = jnp.argmax(rate, axis=1).astype(jnp.int32)
        if self.by_batch:
            rows = active.sum()
            allowed = jnp.int32(self.max_tokens)
            for low, high, count in self.by_batch:
                allowed = jnp.where((rows >= low) & (rows <= high), count, allowed)
            limit = jnp.minimum(limit, allowed)
        return jnp.where(active, limit, 0)
