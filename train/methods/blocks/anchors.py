"""Blocks at random anchors of packed rows, run as in decoding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.models.heads.block import Block
from specjax.models.layers.attention import Partial, attend, attend_in_blocks, merge
from train.data.batches import Batch
from train.methods.packed_rows import at_rows, label_ahead


class Blocks(NamedTuple):
    """The blocks of a batch: A per row, each with K drafts.

    `labels` are the row positions of the tokens that the first drafts predict, padded with -1, each
    the one after an anchor; draft k predicts the token k positions later, if `scored`.
    """

    labels: Int[Array, "B A"]
    scored: Bool[Array, "K B A"]

    @property
    def anchors(self) -> Int[Array, "B A"]:
        """The row positions of the anchors; arbitrary where there is no label."""
        return jnp.maximum(self.labels - 1, 0)

    def drafted(self, tokens: int) -> Int[Array, "B AK"]:
        """Return the row positions of all drafted tokens, block by block, in rows of `tokens`."""
        drafts, batch, _ = self.scored.shape
        positions = self.anchors[:, :, None] + 1 + jnp.arange(drafts)[None, None, :]
        return jnp.minimum(positions, tokens - 1).reshape(batch, -1)


def choose_blocks(
    labels: Int[Array, "B N"], count: int, drafts: int, key: Key[Array, ""]
) -> Blocks:
    """Return up to `count` blocks per row at labels chosen at random, without repetition.

    `labels` are those of a batch, and `drafts` is the number of tokens drafted per block (K).
    """
    noise = jnp.where(labels >= 0, jax.random.uniform(key, labels.shape), -1.0)
    score, chosen = lax.top_k(noise, min(count, labels.shape[1]))
    take = lambda values: jnp.take_along_axis(values, chosen, axis=1)  # noqa: E731
    exists = score >= 0
    scored = [exists & take(label_ahead(labels, draft)) for draft in range(drafts)]
    return Blocks(jnp.where(exists, take(labels), -1), jnp.stack(scored))


def run_blocks(
    head: Block,
    params: dict,
    batch: Batch,
    taps: dict[str, Float[Array, "B T Dt"]],
    blocks: Blocks,
) -> Float[Array, "B A K D"]:
    """Return the states of the drafts of all blocks.

    Each block attends to the features of the tokens before its anchor, in the anchor's segment, and
    to itself. The two results are merged, so that scores of all blocks with each other do not
    exist.
    """
    config, anchors = head.config, blocks.anchors
    num_blocks, drafts = anchors.shape[1], len(blocks.scored)
    slots, (size, length) = config.num_slots(drafts), batch.tokens.shape
    root = at_rows(batch.tokens, anchors)[:, :, None]
    masks = jnp.full((size, num_blocks, slots - 1), config.mask_token_id, root.dtype)
    tokens = jnp.concatenate([root, masks], axis=2).reshape(size, -1)
    positions = at_rows(batch.positions, anchors)[:, :, None] + jnp.arange(slots)[None, None, :]

    same = at_rows(batch.segments, anchors)[:, :, None] == batch.segments[:, None, :]
    before = jnp.arange(length)[None, None, :] < anchors[:, :, None]
    heads, kv_heads = config.decoder.num_heads, config.decoder.num_kv_heads
    queries_per_block = slots * heads // kv_heads
    seen = jnp.repeat(same & before, queries_per_block, axis=1)[:, None]
    inside = jnp.repeat(head.visible(slots), heads // kv_heads, axis=0)[None, None]
    context = head.context(params, head.fuse(params, taps), batch.positions)
    rounded = head.multiply is not None

    def by_block(x: Float[Array, "B G AX C"]) -> Float[Array, "BA G X C"]:
        x = x.reshape(size, kv_heads, num_blocks, -1, x.shape[-1])
        return jnp.moveaxis(x, 2, 1).reshape(size * num_blocks, kv_heads, -1, x.shape[-1])

    def by_row(x: Float[Array, "BA G X C"]) -> Float[Array, "B G AX C"]:
        x = x.reshape(size, num_blocks, kv_heads, -1, x.shape[-1])
        return jnp.moveaxis(x, 1, 2).reshape(size, kv_heads, -1, x.shape[-1])

    def attend_layer(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Partial:
        of_features = attend_in_blocks(
            query, context.k[layer], context.v[layer], seen, rounded=rounded
        )
        own_key, own_value = (by_block(x.transpose(0, 2, 1, 3)) for x in (key, value))
        of_block = attend(by_block(query), own_key, own_value, inside, rounded=rounded)
        return merge(of_features, Partial(*map(by_row, of_block)))

    states = head.states(params, tokens, positions.reshape(size, -1), attend_layer, slots)
    states = states.reshape(size, num_blocks, slots, -1)
    return states[:, :, slots - drafts :]
