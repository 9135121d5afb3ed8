"""The longest draft that a row may make: fixed, or by the number of rows that still decode."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class DraftLength:
    """The longest draft of each row.

    At most `max_tokens` (K). `by_batch` holds (low, high, k): with low..high unfinished rows, k.
    With `auto`, a `policy.Policy` decides in each round how much of that pays. With `replayed`,
    each row drafts as long, and with the same drafter, as its `Rows.replay` says, beside however
    many rows.
    """

    max_tokens: int
    by_batch: tuple[tuple[int, int, int], ...] = ()
    auto: bool = False
    replayed: bool = False

    def limit(self, active: Bool[Array, "B"]) -> Int[Array, "B"]:
        """The longest draft each row may make now; 0 for finished rows."""
        allowed = jnp.int32(self.max_tokens)
        rows = active.sum()
        for low, high, count in () if self.replayed else self.by_batch:
            here = (rows >= low) & (rows <= high)
            allowed = jnp.where(here, min(count, self.max_tokens), allowed)
        return jnp.where(active, allowed, 0)
