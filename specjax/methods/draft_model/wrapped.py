"""What draft models have in common that are a model with other tokens or logits."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.core.cache import KVCache, Window
from specjax.core.language_model import LanguageModel


@dataclass(frozen=True)
class WrappedModel:
    """A `LanguageModel` but for `extend`, with the caches and positions of its `decoder`."""

    decoder: LanguageModel

    @property
    def max_positions(self) -> int:
        """The longest supported sequence, in tokens."""
        return self.decoder.max_positions

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache [L, B, G, S, C]."""
        return self.decoder.make_cache(batch, capacity)

    def make_window(self, batch: int, slots: int) -> Window:
        """Return an empty window [L, B, G, W, C]."""
        return self.decoder.make_window(batch, slots)
