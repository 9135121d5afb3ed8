"""The longest match of rows' last tokens in sorted texts, and its continuations, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.methods.corpus.sorted_text import SortedText
from specjax.methods.suffix import MOST_MATCHES

SEPARATOR = np.iinfo(np.int32).max
"""The token id that stands between documents, before the first and after the last one."""


class Match(NamedTuple):
    """The longest match of each row, and the tokens that followed it.

    `length` is the number of matched tokens, 0 without a match. `tokens` are the continuations of
    up to m occurrences, of which the `known` ones exist, with `SEPARATOR` after the end of a
    document.
    """

    length: Int[Array, "B"]
    tokens: Int[Array, "B m K"]
    known: Bool[Array, "B m"]


def find_longest(texts: Sequence[SortedText], last: Int[Array, "B L"], num_tokens: int) -> Match:
    """Return the longest match of each row's `last` tokens in any text.

    `last` has the last token first; continuations have `num_tokens` (K) tokens. Of equally long
    matches that in the first text is returned.
    """
    longest, *others = (_match(text, last, num_tokens) for text in texts)
    for match in others:
        longer = match.length > longest.length
        longest = Match(
            jnp.maximum(match.length, longest.length),
            jnp.where(longer[:, None, None], match.tokens, longest.tokens),
            jnp.where(longer[:, None], match.known, longest.known),
        )
    return longest


def _match(text: SortedText, last: Int[Array, "B L"], num_tokens: int) -> Match:
    """Return the longest match of each row in one text."""
    batch, most = last.shape
    rank = _rank(text, last, jnp.full(batch, most, jnp.int32), after=False)
    # The two sorted positions next to where the row would be inserted match it best.
    beside = jnp.stack([rank - 1, rank], axis=1)
    same = _tokens_to(text, beside, most) == last[:, None, :]
    exists = (beside >= 0) & (beside < text.count)
    length = jnp.where(exists, jnp.cumprod(same, axis=2).sum(axis=2), 0).max(axis=1)
    first = _rank(text, last, length, after=False)
    size = _rank(text, last, length, after=True) - first
    # The occurrences that are counted are spread evenly over all.
    number = jnp.arange(MOST_MATCHES)[None, :]
    counted = jnp.clip(size, 1, MOST_MATCHES)[:, None]
    # number * size // counted, without a product that could be too large.
    stride, rest = jnp.divmod(size[:, None], counted)
    ranks = first[:, None] + number * stride + number * rest // counted
    known = (number < counted) & (length > 0)[:, None]
    ends = text.order[jnp.where(known, ranks, 0)]
    tokens = _tokens_at(text, ends[:, :, None] + 1 + jnp.arange(num_tokens)[None, None, :])
    return Match(length, tokens, known)


def _rank(
    text: SortedText, last: Int[Array, "B L"], length: Int[Array, "B"], *, after: bool
) -> Int[Array, "B"]:
    """Return how many sorted positions come before each row's `length` last tokens.

    With `after`, positions preceded by the same tokens are counted too.
    """
    compared = jnp.arange(last.shape[1])[None, :] < length[:, None]

    def halve(_: Int[Array, ""], bounds: tuple[Int[Array, "B"], Int[Array, "B"]]) -> Any:
        low, high = bounds
        middle = low + (high - low) // 2
        tokens = _tokens_to(text, middle[:, None], last.shape[1])[:, 0]
        differs = (tokens != last) & compared
        at = jnp.argmax(differs, axis=1)[:, None]
        is_before = (jnp.take_along_axis(tokens, at, 1) < jnp.take_along_axis(last, at, 1))[:, 0]
        is_before = jnp.where(differs.any(axis=1), is_before, after) & (low < high)
        return jnp.where(is_before, middle + 1, low), jnp.where(is_before, high, middle)

    bounds = jnp.zeros_like(length), jnp.broadcast_to(text.count, length.shape)
    return lax.fori_loop(0, len(text.order).bit_length(), halve, bounds)[0]


def _tokens_to(text: SortedText, ranks: Int[Array, "B m"], count: int) -> Int[Array, "B m L"]:
    """Return the `count` tokens up to the sorted positions `ranks`, the last token first."""
    ends = text.order[jnp.clip(ranks, 0, len(text.order) - 1)]
    return _tokens_at(text, ends[:, :, None] - jnp.arange(count)[None, None, :])


def _tokens_at(text: SortedText, positions: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return the tokens at `positions`, or `SEPARATOR` outside of documents."""
    size = len(text.tokens)
    tokens = text.tokens[jnp.clip(positions, 0, size - 1)]
    outside = (positions < 0) | (positions >= size) | (tokens == jnp.iinfo(tokens.dtype).max)
    return jnp.where(outside, SEPARATOR, tokens.astype(jnp.int32))
