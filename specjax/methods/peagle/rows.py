"""Draft steps of a P-EAGLE head at many positions of whole rows at once, without a cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.methods.block.rows import attend_to_row_and_block
from specjax.methods.peagle.head import PEagle
from specjax.models.layers.attention import attend_in_blocks


def run_depths(
    head: PEagle,
    params: dict[str, Any],
    tokens: Int[Array, "B T"],
    features: dict[str, Float[Array, "B T Dt"]],
    positions: Int[Array, "B T"],
    visible: Bool[Array, "B T T"],
    rows: Int[Array, "B A"],
    depths: int,
) -> Float[Array, "K B A D"]:
    """Return the outputs of K = `depths` depths that begin at each of A pairs per row.

    The pair at position t is x_{t+1} and the features of t; it attends to the pairs that `visible`
    allows. Those at `rows` are each followed by masks, as in decoding, which attend to the same
    pairs and to earlier masks of their own.
    """
    decoder, (size, count), masks = head.config.decoder, rows.shape, depths - 1
    repeats, rounded = decoder.num_heads // decoder.num_kv_heads, head.multiply is not None
    tokens, pairs = jnp.roll(tokens, -1, axis=1), head.fuse(params, features)
    mask_tokens, further = head.masks(params, size, count * masks)
    seen = jnp.take_along_axis(visible, rows[:, :, None], axis=1)
    after = jnp.take_along_axis(positions, rows, axis=1)[:, :, None]
    after = (after + jnp.arange(1, depths)[None, None]).reshape(size, -1)
    inside = jnp.tril(jnp.ones((masks, masks), bool))

    def grouped(mask: Bool[Array, "B X T"], copies: int) -> Bool[Array, "B 1 XH T"]:
        return jnp.repeat(mask, copies * repeats, axis=1)[:, None]

    for index in range(decoder.num_layers):
        layer = head.layer(params, index)
        residual, attended = head.inputs(layer, tokens, pairs, positions)
        query, keys, values, _ = head.heads(layer, attended, positions)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        if masks:
            mask_residual, attended = head.inputs(layer, mask_tokens, further, after)
            mask_query, *own, _ = head.heads(layer, attended, after)
            mixed = attend_to_row_and_block(
                *(mask_query, keys, values, grouped(seen, masks)),
                *(*own, jnp.repeat(inside, repeats, axis=0)[None, None], count),
                rounded=rounded,
            )
            further, _ = head.finish(layer, mask_residual, mixed, None)
        if index + 1 == decoder.num_layers:
            # Of the last layer only the outputs at `rows` are read.
            at = query.reshape(*query.shape[:2], tokens.shape[1], repeats, -1)
            query = jnp.take_along_axis(at, rows[:, None, :, None, None], axis=2)
            query = query.reshape(*query.shape[:2], -1, query.shape[-1])
            residual, visible = jnp.take_along_axis(residual, rows[:, :, None], axis=1), seen
        mixed = attend_in_blocks(query, keys, values, grouped(visible, 1), rounded=rounded)
        pairs, _ = head.finish(layer, residual, mixed, None)
    further = further.reshape(size, count, masks, -1)
    return jnp.moveaxis(jnp.concatenate([pairs[:, :, None], further], axis=2), 2, 0)
