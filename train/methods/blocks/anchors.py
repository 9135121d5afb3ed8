"""Blocks at random anchors of packed rows, run as in decoding."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.methods.block import rows as block_rows
from specjax.methods.block.head import BlockHead
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
    head: BlockHead,
    params: dict,
    batch: Batch,
    taps: dict[str, Float[Array, "B T Dt"]],
    blocks: Blocks,
) -> Float[Array, "B A K D"]:
    """Return the states of the drafts of all blocks.

    Each block attends to the features of the tokens before its anchor, in the anchor's segment, and
    to itself.
    """
    anchors = blocks.anchors
    same = at_rows(batch.segments, anchors)[:, :, None] == batch.segments[:, None, :]
    before = jnp.arange(batch.tokens.shape[1])[None, None, :] < anchors[:, :, None]
    return block_rows.run_blocks(
        head,
        params,
        taps,
        batch.positions,
        at_rows(batch.tokens, anchors),
        at_rows(batch.positions, anchors),
        same & before,
        len(blocks.scored),
    )
