"""A language model made of a table of logits, with distributions in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window, make_cache
from specjax.core.language_model import Extension
from specjax.core.top_tokens import top_tokens, wanted_counts


@dataclass(frozen=True)
class Tabular:
    """A `LanguageModel` whose parameters are a table of logits; it has no layers or keys.

    Parameters of shape [V] give the same distribution after every context. With shape [V, V], row i
    gives the distribution after token i (a bigram model).
    """

    vocab_size: int
    max_positions: int = 1 << 20

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache without layers, [0, B, 1, S, 1], which only counts tokens."""
        return make_cache(0, batch, 1, capacity, 1, jnp.dtype(jnp.float32))

    def make_window(self, batch: int, slots: int) -> Window:
        """Return an empty window without layers, [0, B, 1, W, 1]."""
        return Window(*(jnp.zeros((0, batch, 1, slots, 1)) for _ in range(2)))

    def extend(
        self,
        params: Float[Array, "*V V"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        window: Window,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        *,
        features: tuple[str, ...] = (),
        logits: bool = True,
        num_layers: int | None = None,
    ) -> Extension:
        """Implement `LanguageModel.extend`; the only features are `top_tokens:k`.

        `num_layers` (early exit) has no effect. Raises ValueError for other features.
        """
        del positions, cache, start, visible, num_layers
        counts = wanted_counts(features, self.vocab_size)
        if len(counts) < len(features):
            raise ValueError(f"features={features}: a tabular model has only top_tokens:k")
        table = jnp.broadcast_to(params, (self.vocab_size, self.vocab_size))
        likeliest = top_tokens(table[tokens], counts)
        return Extension(table[tokens] if logits else None, likeliest, window)
