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

_GATHERED = 1 << 22
"""Tokens that are counted at once."""


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
            if size > _GATHERED:
                add()
                waiting, size = [], 0
        add()
        return cls(vocab_size, pairs, counts)

    def log_probs(
        self, before: Int[np.ndarray, "T"], tokens: Int[np.ndarray, "T"]
    ) -> Float64[np.ndarray, "T"]:
        """The log-probability, in nats, of each token after the one before it."""
        single, total, spread = self._parts()
        pair = before.astype(np.int64) * self.vocab_size + tokens
        index = np.searchsorted(self.pairs, pair)
        there = np.append(self.pairs, -1)[index] == pair
        kept = np.where(there, np.append(self.counts, 0)[index] - self._discount, 0)
        known = (kept + spread[before] * single[tokens]) / np.maximum(total[before], 1)
        return np.log(np.where(total[before] > 0, known, single[tokens]))

    def likeliest(self) -> Int64[np.ndarray, "V"]:
        """The likeliest token after each token."""
        single, _, spread = self._parts()
        first, second = np.divmod(self.pairs, self.vocab_size)
        # Of the tokens that never came after it, the likeliest is the likeliest of all.
        common = int(single.argmax())
        every = np.arange(self.vocab_size)
        after = np.concatenate([first, every])
        token = np.concatenate([second, np.full(self.vocab_size, common)])
        kept = np.concatenate([self.counts - self._discount, np.zeros(self.vocab_size)])
        score = kept + spread[after] * single[token]
        # The last one written of each token counts, which is the best one.
        order = np.argsort(score, kind="stable")
        best = np.full(self.vocab_size, common, np.int64)
        best[after[order]] = token[order]
        return best

    @property
    def _discount(self) -> float:
        return _discount(self.counts)

    def _parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By token: its share of different pairs, its count, and what is taken from its pairs."""
        first, second = np.divmod(self.pairs, self.vocab_size)
        size = self.vocab_size
        kinds = np.bincount(second, minlength=size)
        different = np.bincount(first, minlength=size)
        total = np.bincount(first, self.counts, size)
        discount = _discount(kinds[kinds > 0])
        rest = discount * np.count_nonzero(kinds) / max(len(self.pairs), 1)
        single = np.maximum(kinds - discount, 0) / max(len(self.pairs), 1) + rest / size
        if not len(self.pairs):
            single = np.full(size, 1 / size)
        return single, total, self._discount * different


def _discount(counts: Int64[np.ndarray, "n"]) -> float:
    """The part of a count that is taken from it: n1 / (n1 + 2 n2) (Ney et al. 1994), about 0.7."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    return once / (once + 2 * twice) if once and twice else 0.5
