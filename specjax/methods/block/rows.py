"""Many blocks of a block drafter at once, over whole rows and without a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.methods.block.head import BlockHead
from specjax.models.layers.attention import Partial, attend, attend_in_blocks, merge


def run_blocks(
    head: BlockHead,
    params: dict[str, Any],
    features: dict[str, Float[Array, "B T Dt"]],
    positions: Int[Array, "B T"],
    roots: Int[Array, "B A"],
    root_positions: Int[Array, "B A"],
    seen: Bool[Array, "B A T"],
    drafts: int,
) -> Float[Array, "B A K D"]:
    """Return the states of the K = `drafts` tokens that each of A blocks per row drafts.

    Block a of a row begins with the token `roots[a]` at `root_positions[a]`, and attends to itself
    and to those of the row's features, at `positions`, that are `seen`. The two results are merged,
    so that scores of all blocks with each other do not exist.
    """
    config, (size, num_blocks) = head.config, roots.shape
    slots = config.num_slots(drafts)
    masks = jnp.full((size, num_blocks, slots - 1), config.mask_token_id, roots.dtype)
    tokens = jnp.concatenate([roots[:, :, None], masks], axis=2).reshape(size, -1)
    block_positions = root_positions[:, :, None] + jnp.arange(slots)[None, None, :]
    heads, kv_heads = config.decoder.num_heads, config.decoder.num_kv_heads
    seen = jnp.repeat(seen, slots * heads // kv_heads, axis=1)[:, None]
    inside = jnp.repeat(head.visible(slots), heads // kv_heads, axis=0)[None, None]
    context = head.context(params, head.fuse(params, features), positions)
    rounded = head.multiply is not None

    def attend_layer(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Partial:
        keys, values = context.k[layer], context.v[layer]
        of_block = key, value, inside, num_blocks
        return attend_to_row_and_block(query, keys, values, seen, *of_block, rounded=rounded)

    states = head.states(params, tokens, block_positions.reshape(size, -1), attend_layer, slots)
    states = states.reshape(size, num_blocks, slots, -1)
    return states[:, :, slots - drafts :]


def attend_to_row_and_block(
    query: Float[Array, "B G AX C"],
    row_key: Float[Array, "B G T C"],
    row_value: Float[Array, "B G T C"],
    seen: Bool[Array, "B 1 AX T"],
    key: Float[Array, "B AS G C"],
    value: Float[Array, "B AS G C"],
    inside: Bool[Array, "1 1 X S"],
    num_blocks: int,
    *,
    rounded: bool,
) -> Partial:
    """Return the attention of A blocks of S slots to the keys of their row, and to their own.

    `seen` masks the former, and `inside` the slots of one block. `rounded` is that of `attend`.
    """
    size, kv_heads = query.shape[:2]

    def by_block(x: Float[Array, "B G AX C"]) -> Float[Array, "BA G X C"]:
        x = x.reshape(size, kv_heads, num_blocks, -1, x.shape[-1])
        return jnp.moveaxis(x, 2, 1).reshape(size * num_blocks, kv_heads, -1, x.shape[-1])

    def by_row(x: Float[Array, "BA G X C"]) -> Float[Array, "B G AX C"]:
        x = x.reshape(size, num_blocks, kv_heads, -1, x.shape[-1])
        return jnp.moveaxis(x, 1, 2).reshape(size, kv_heads, -1, x.shape[-1])

    of_row = attend_in_blocks(query, row_key, row_value, seen, rounded=rounded)
    own_key, own_value = (by_block(x.transpose(0, 2, 1, 3)) for x in (key, value))
    of_block = attend(by_block(query), own_key, own_value, inside, rounded=rounded)
    return merge(of_row, Partial(*map(by_row, of_block)))
