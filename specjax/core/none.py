"""The empty drafter: plain decoding in the same loop, the baseline of every speed-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax import trees
from specjax.core.drafter import Context, Drafter, Noise
from specjax.trees import Draft

PLAIN_DECODING = "none"
"""The name of plain decoding in place of a drafter's."""


@dataclass(frozen=True, kw_only=True)
class NoDrafter(Drafter):
    """The drafter that proposes nothing, so that every round emits one token (plain decoding)."""

    name: ClassVar[str] = PLAIN_DECODING
    num_speculative_tokens: int = 0

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Return an empty draft."""
        del params, noise
        return empty_draft(context.length.shape[0], self.num_speculative_tokens), state


def empty_draft(batch: int, length: int) -> Draft:
    """Return a draft of `batch` rows with `length` nodes, none of which is valid."""
    return trees.chain(jnp.zeros((batch, length), jnp.int32), jnp.zeros(batch, jnp.int32))
