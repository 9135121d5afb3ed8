"""What the layers of a decoder see in which they differ: rotations, and sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.cache import Window
from specjax.models.config import DecoderConfig
from specjax.models.layers.decoder_layer import Rotation, rotate_by


class LayerView(NamedTuple):
    """One layer's rotation, mask of the window, and the oldest committed key of each query.

    X counts the queries of one key/value head. Without sliding windows `oldest` is None.
    """

    rotation: Rotation | None
    seen: Bool[Array, "#B 1 X W"]
    oldest: Int[Array, "B X"] | None = None

    @property
    def limits(self) -> dict[str, Int[Array, "B X"]]:
        """What the attention to the cache is called with: nothing where nothing is limited."""
        return {} if self.oldest is None else {"oldest": self.oldest}


def layer_views(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    window: Window | None,
    visible: Bool[Array, "#B T W"],
    repeats: int,
) -> Callable[[Int[Array, ""] | int], LayerView]:
    """The view of each layer, by its index; `repeats` queries share a key head and a token.

    The two kinds of layers, with and without sliding window, are computed once; a layer whose
    index is traced selects between them. Without `window` (training) the T tokens see each other.
    """

    def spread(mask: jax.Array, axis: int = 1) -> jax.Array:
        # The queries that share a key head are adjacent, token by token.
        return jnp.repeat(mask, repeats, axis=axis)

    full = LayerView(rotate_by(positions, config), spread(visible)[:, None])
    sliding = config.sliding_window
    windowed = config.windowed
    if sliding is None or not any(windowed):
        return lambda index: full
    oldest = positions - (sliding.size - 1)
    others = positions if window is None else window.positions
    recent = visible & (others[:, None, :] >= oldest[:, :, None])
    rotation = full.rotation
    if sliding.rope_theta is not None:
        rotation = rotate_by(positions, config, windowed=True)
    local = LayerView(rotation, spread(recent)[:, None], spread(oldest))
    if all(windowed):
        return lambda index: local
    everything = full._replace(
        seen=jnp.broadcast_to(full.seen, local.seen.shape), oldest=jnp.zeros_like(local.oldest)
    )

    def view(index: Int[Array, ""] | int) -> LayerView:
        if isinstance(index, int):
            return local if windowed[index] else everything
        here = jnp.asarray(np.asarray(windowed))[index]
        return jax.tree.map(lambda a, b: a if a is b else jnp.where(here, a, b), local, everything)

    return view
