"""A bigram model of token ids, from counts: what a language model has to be better than.

Interpolated Kneser-Ney (Chen and Goodman 1999, section 4.1.6, with one discount):
p(y | x) = (c(x, y) - d) / c(x) + d n(x) / c(x) * p(y), where n(x) counts the different tokens after
x, and p(y) is the share of y among all different pairs, with the same discount and the rest spread
evenly over the vocabulary. What it costs is estimated from the counts, none of it from the text it
is measured on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64


@dataclass(frozen=True, eq=False)
class Bigram:
    """Counts of pairs of tokens; V is `vocab_size`.

    `pairs` [n] are x V + y of the pairs that occur, ascending, `counts` [n] how often they do.
    """

    vocab_size: int
    pairs: Int64[np.ndarray, "n"]
    counts: Int64[np.ndarray, "n"]

    @classmethod
    def of(cls, texts: Iterable[Int[np.ndarray, "T"]], vocab_size: int) -> Bigram:
        """The counts of token sequences; no pair spans two of them."""
        pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        waiting: list[np.ndarray] = []
        size = 0

        def add() -> None:
            nonlocal pairs, counts
            every = np.concatenate([pairs, *waiting])
            weights = np.concatenate([counts, np.ones(len(every) - len(pairs), np.int64)])
            pairs, where = np.unique(every, return_inverse=True)
            counts = np.bincount(where, weights, len(pairs)).astype(np.int64)

        for tokens in texts:
            ids = tokens.astype(np.int64)
            waiting.append(ids[:-1] * vocab_size + ids[1:])
            size += len(ids)
            if size > 1 << 22:
                add()
                waiting, size = [], 0
        add()
        return cls(vocab_size, pairs, counts)

    def log_probs(
        self, before: Int[np.ndarray, "T"], tokens: Int[np.ndarray, "T"]
    ) -> Float64[np.ndarray, "T"]:
        """The log-probability, in nats, of each token after the one before it."""
        single = self._single()
        pair = before.astype(np.int64) * self.vocab_size + tokens
        index = np.minimum(np.searchsorted(self.pairs, pair), max(len(self.pairs) - 1, 0))
        found = self.pairs[index] == pair if len(self.pairs) else np.zeros(len(pair), bool)
        count = np.where(found, self.counts[index], 0) if len(self.pairs) else np.zeros(len(pair))
        first = self.pairs // self.vocab_size
        total = np.bincount(first, self.counts, self.vocab_size)[before]
        different = np.bincount(first, minlength=self.vocab_size)[before]
        discount = _discount(self.counts)
        known = np.maximum(count - discount, 0) + discount * different * single[tokens]
        return np.log(np.where(total > 0, known / np.maximum(total, 1), single[tokens]))

    def likeliest(self) -> Int64[np.ndarray, "V"]:
        """The likeliest token after each token: the smallest id of several."""
        best = np.full(self.vocab_size, int(self._single().argmax()), np.int64)
        first, second = np.divmod(self.pairs, self.vocab_size)
        # The last one written counts: the highest count, and of those the smallest id.
        order = np.lexsort((-second, self.counts))
        best[first[order]] = second[order]
        return best

    def _single(self) -> Float64[np.ndarray, "V"]:
        """The distribution of a token after one that says nothing about it; positive everywhere."""
        kinds = np.bincount(self.pairs % self.vocab_size, minlength=self.vocab_size)
        total = kinds.sum()
        if not total:
            return np.full(self.vocab_size, 1 / self.vocab_size)
        discount = _discount(kinds[kinds > 0])
        rest = discount * np.count_nonzero(kinds) / total
        return np.maximum(kinds - discount, 0) / total + rest / self.vocab_size


def _discount(counts: Int64[np.ndarray, "n"]) -> float:
    """The part of a count that is taken from it: n1 / (n1 + 2 n2) (Ney et al. 1994), about 0.7."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once and twice else 0.5
