"""Text as token ids, with positions sorted by the tokens that precede them, for fast search.

This is a suffix array of the reversed text, in which `LONGEST_MATCH` tokens are compared: positions
preceded by the same tokens are adjacent, so that a binary search finds the longest match of a row's
last tokens, and all occurrences of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Integer, UInt32

from specjax.sampling import text_digest

LONGEST_MATCH = 16
"""The number of tokens by which positions are sorted, and thus the length of the longest match."""
_CHUNK = 1 << 20
"""The number of positions that are sorted at once, unless a single token has more."""


class SortedText(NamedTuple):
    """Documents as token ids, each followed by a separator: the largest number of the dtype.

    `order[:count]` are the positions of tokens with a successor, sorted by the token at the
    position, then by the token before it, and so on; separators stand in for tokens before the
    text. `digest` is the `sampling.text_digest` of the tokens.
    """

    tokens: Integer[Array | np.ndarray, "T"]
    order: Int[Array | np.ndarray, "n"]
    count: Int[Array | np.ndarray, ""]
    digest: UInt32[Array | np.ndarray, "2"]


def token_dtype(vocab_size: int) -> Any:
    """Return the smallest dtype that can represent a vocabulary's token ids and a separator."""
    return np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.int32


def with_separator(
    document: Sequence[int] | Integer[np.ndarray, "T"], dtype: Any
) -> Integer[np.ndarray, "n"]:
    """Return the tokens of a document as an array of `dtype`, followed by the separator."""
    separator = np.full(1, np.iinfo(dtype).max, dtype)
    return np.concatenate([np.asarray(document, dtype), separator])


def sorted_text(documents: Sequence[np.ndarray], size: int, dtype: Any) -> SortedText:
    """Return a `SortedText` of documents that end with separators, in arrays for `size` tokens.

    The tokens have the given `dtype`, from `token_dtype`.
    """
    tokens = np.full(size, np.iinfo(dtype).max, dtype)
    first = 0
    for document in documents:
        tokens[first : first + len(document)] = document
        first += len(document)
    chosen, order = have_successor(tokens), np.zeros(size, np.int32)
    count = np.int32(np.count_nonzero(chosen))
    sort_positions(tokens, chosen, order[:count])
    return SortedText(tokens, order, count, text_digest(tokens))


def have_successor(tokens: Integer[np.ndarray, "T"]) -> Bool[np.ndarray, "T"]:
    """Return a mask of the tokens that another token of the same document follows.

    Separators end documents.
    """
    is_token = tokens != np.iinfo(tokens.dtype).max
    is_token[:-1] &= is_token[1:]
    is_token[-1:] = False
    return is_token


def sort_positions(
    tokens: Integer[np.ndarray, "T"],
    chosen: Bool[np.ndarray, "T"],
    order: Int32[np.ndarray, "n"],
    tell: Callable[[int], object] = lambda done: None,
) -> None:
    """Fill `order` with the positions marked in `chosen`, sorted as in a `SortedText`.

    `tell` is called with the number of positions sorted so far. Working memory is about 80 bytes
    per position that is sorted at once: a million, or more if the most frequent token has more.
    """
    ends = _distribute(tokens, chosen, order)
    first = 0
    while first < len(order):
        after = ends[ends > first]
        end = int(max(after[0], after[after <= first + _CHUNK].max(initial=0)))
        block = np.array(order[first:end])
        order[first:end] = block[np.lexsort(_keys(tokens, block))]
        first = end
        tell(first)


def _distribute(
    tokens: Integer[np.ndarray, "T"],
    chosen: Bool[np.ndarray, "T"],
    order: Int32[np.ndarray, "n"],
) -> Int[np.ndarray, "V"]:
    """Fill `order` with the chosen positions, grouped by token; return where each group ends."""
    size = int(np.max(tokens, where=chosen, initial=0)) + 1
    chunks = [slice(first, first + _CHUNK) for first in range(0, len(tokens), _CHUNK)]
    counts = np.zeros(size, np.int64)
    for chunk in chunks:
        counts += np.bincount(tokens[chunk][chosen[chunk]], minlength=size)
    ends = np.cumsum(counts)
    free = ends - counts
    for chunk in chunks:
        positions = chunk.start + np.flatnonzero(chosen[chunk])
        positions = positions[np.argsort(tokens[positions], kind="stable")]
        ids = tokens[positions]
        counts = np.bincount(ids, minlength=size)
        before = np.cumsum(counts) - counts
        order[free[ids] + np.arange(len(ids)) - before[ids]] = positions
        free += counts
    return ends


def _keys(
    tokens: Integer[np.ndarray, "T"], positions: Int32[np.ndarray, "n"]
) -> list[Integer[np.ndarray, "n"]]:
    """Return the sort keys, least significant first, in 16 bits: NumPy then needs linear time."""
    keys = []
    for back in reversed(range(LONGEST_MATCH)):
        key = tokens[np.maximum(positions - back, 0)]
        key[positions < back] = np.iinfo(tokens.dtype).max
        if tokens.dtype != np.uint16:
            keys.append((key & 0xFFFF).astype(np.uint16))
            key = key >> 16
        keys.append(key.astype(np.uint16))
    return keys
