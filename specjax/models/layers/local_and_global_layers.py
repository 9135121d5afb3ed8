"""What differs between a decoder's layers: rotations, and masks of sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.core.cache import Window
from specjax.models.config import DecoderConfig, SlidingWindow
from specjax.models.layers.decoder_layer import Rotation, rotate_by


class LayerView(NamedTuple):
    """The rotation, the mask of the window, and the oldest visible committed key, for one layer.

    X counts the queries of one key/value head. `oldest` has a position per query, and is None
    without sliding windows.
    """

    rotation: Rotation | None
    seen: Bool[Array, "#B 1 X W"]
    oldest: Int[Array, "B X"] | None = None


def recent_keys(
    sliding: SlidingWindow,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B W"],
    visible: Bool[Array, "#B T W"],
) -> tuple[Bool[Array, "B T W"], Int[Array, "B T"]]:
    """Return which window slots tokens at `positions` see within a sliding window.

    Of the slots in `visible`, at `key_positions`, these are the latest and the sinks. The second
    result is the position of the oldest key, other than sinks, that each token sees.
    """
    oldest = positions - (sliding.size - 1)
    keys = key_positions[:, None, :]
    return visible & ((keys >= oldest[:, :, None]) | (keys < sliding.sinks)), oldest


def layer_views(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    window: Window | None,
    visible: Bool[Array, "#B T W"],
    repeats: int,
) -> Callable[[Int[Array, ""] | int], LayerView]:
    """Return a function from a layer's index to its `LayerView`.

    `repeats` is the number of query heads per key/value head. The views with and without sliding
    window, and with and without rotation, are computed once; a traced index selects among them.
    Without `window` (training) the T tokens attend to each other.
    """
    views = _masks_and_rotations(config, positions, window, visible, repeats)
    return _with_rotations(config, views)


def _masks_and_rotations(
    config: DecoderConfig,
    positions: Int[Array, "B T"],
    window: Window | None,
    visible: Bool[Array, "#B T W"],
    repeats: int,
) -> Callable[[Int[Array, ""] | int], LayerView]:
    """Return the views of layers as if all had rotations; the arguments are `layer_views`'."""

    def spread(mask: jax.Array, axis: int = 1) -> jax.Array:
        # Queries are ordered by token; those of one token that share a key head are adjacent.
        return jnp.repeat(mask, repeats, axis=axis)

    full_view = LayerView(rotate_by(positions, config), spread(visible)[:, None])
    sliding = config.sliding_window
    windowed = config.windowed
    if sliding is None or not any(windowed):
        return lambda index: full_view
    key_positions = positions if window is None else window.positions
    seen, oldest = recent_keys(sliding, positions, key_positions, visible)
    rotation = full_view.rotation
    if sliding.rope_theta is not None:
        rotation = rotate_by(positions, config, windowed=True)
    local_view = LayerView(rotation, spread(seen)[:, None], spread(oldest))
    if all(windowed):
        return lambda index: local_view
    global_view = full_view._replace(
        seen=jnp.broadcast_to(full_view.seen, local_view.seen.shape),
        oldest=jnp.zeros_like(local_view.oldest),
    )

    def view(index: Int[Array, ""] | int) -> LayerView:
        if isinstance(index, int):
            return local_view if windowed[index] else global_view
        is_local = jnp.asarray(np.asarray(windowed))[index]

        def select(local: jax.Array, everywhere: jax.Array) -> jax.Array:
            return local if local is everywhere else jnp.where(is_local, local, everywhere)

        return jax.tree.map(select, local_view, global_view)

    return view


def _with_rotations(
    config: DecoderConfig, view: Callable[[Int[Array, ""] | int], LayerView]
) -> Callable[[Int[Array, ""] | int], LayerView]:
    """Return views as `view` has them, in which layers without rotation turn by the angle 0."""
    unrotated = config.unrotated
    if not any(unrotated):
        return view

    def rotated_or_not(index: Int[Array, ""] | int) -> LayerView:
        of_layer = view(index)
        if of_layer.rotation is None:
            return of_layer
        still = jnp.asarray(np.asarray(unrotated))[index]
        cos, sin = of_layer.rotation
        return of_layer._replace(rotation=(jnp.where(still, 1.0, cos), jnp.where(still, 0.0, sin)))

    return rotated_or_not
