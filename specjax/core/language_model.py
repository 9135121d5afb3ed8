"""The interface between language models and the decoding loop: pure functions without Flax."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window


@struct.dataclass
class Extension:
    """The result of a forward pass.

    `logits` are in float32, or None if they were not requested; `features` are arrays by name;
    `window` is the window with the new keys and values.
    """

    logits: Float[Array, "B T V"] | None
    features: dict[str, Float[Array, "B T D"] | Int[Array, "B T ..."] | Float[Array, "L B T D"]]
    window: Window | None


@runtime_checkable
class LanguageModel(Protocol):
    """A model as pure functions of its parameters, which are an argument of `extend`.

    It is hashable, for use as a static argument of compiled functions.
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens (V)."""

    @property
    def max_positions(self) -> int:
        """The longest supported sequence, in tokens."""

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` rows with a capacity of `capacity` tokens."""

    def make_window(self, batch: int, slots: int) -> Window:
        """Return an empty window of W = `slots` slots."""

    def extend(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None,
        window: Window | None,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        *,
        features: tuple[str, ...] = (),
        logits: bool = True,
        num_layers: int | None = None,
        first_layer: int = 0,
        states: Float[Array, "B T D"] | None = None,
    ) -> Extension:
        """Run T tokens per row through the model; the cache is read but not changed.

        The tokens fill the window's slots start..start+T. Each attends to its row's committed
        tokens, which are in the cache, and to the window slots that `visible` allows, which include
        its own. With `num_layers`, only that many layers run before the final norm (early exit).
        With `first_layer`, the layers before it do not run again: `states`, the `pre_norm` of an
        early exit there for the same tokens, are its inputs, and the window already holds the
        earlier layers' keys and values. Without cache and window (training), the T tokens attend to
        each other by `visible` [#B, T, T], and no keys are returned. Features are `final_norm`,
        `pre_norm` and `layer_input:i` [B, T, D], `top_tokens:k` [B, T, k], `experts`, the experts
        of each token in the M sparse layers [B, T, M, K], and `queries`, those of all layers,
        rotated and scaled, in one axis [B, T, L H C].
        """
