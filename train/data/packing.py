"""Pack conversations into rows of fixed length, in a seeded order.

The order of an epoch is a pure function of the seed, the epoch and the conversations' lengths. So a
position in the data is two numbers, and each process knows all rows without reading those of other
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from specjax.errors import InputError
from train.data.examples import Example

_WINDOW = 4096
"""The number of conversations that are packed together; larger windows would only take longer."""


@runtime_checkable
class Source(Protocol):
    """Conversations by index, whose lengths are known without reading them.

    `lengths` [n] are numbers of tokens, and `num_labels` [n] the numbers of tokens that the loss
    mask selects.
    """

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each conversation, int32 [n]."""

    @property
    def num_labels(self) -> np.ndarray:
        """The number of tokens of each conversation that count in the loss, int32 [n]."""

    def __getitem__(self, index: int) -> Example:
        """Return the conversation at an index."""


class Position(NamedTuple):
    """The next row to read: its epoch, and its index in that epoch."""

    epoch: int
    row: int


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: `rows` (B) of `tokens` (T), with up to `labels` (A) labels per row.

    `features` are the names of target features in the batch, and `width` is their width D.
    """

    rows: int
    tokens: int
    labels: int
    features: tuple[str, ...] = ()
    width: int = 0


class Packing:
    """The assignment of conversations to rows, epoch by epoch.

    `chosen` are the indices of the conversations to pack. Those without a label within the length
    of a row are omitted; `left_out` is their number. Raises InputError if none remain.
    """

    def __init__(self, source: Source, chosen: np.ndarray, shape: Shape, seed: int) -> None:
        lengths, labels = source.lengths.astype(np.int64), source.num_labels.astype(np.int64)
        # A conversation that is truncated loses labels from its end.
        useful = chosen[(labels - np.maximum(lengths - shape.tokens, 0))[chosen] > 0]
        self.left_out = len(chosen) - len(useful)
        if not len(useful):
            raise InputError(
                f"data: none of the {len(chosen)} conversations has a token to learn from within "
                f"its first {shape.tokens} tokens; check the loss masks, or raise row_tokens"
            )
        self._chosen, self._shape, self._seed = useful, shape, seed
        self._lengths = np.minimum(lengths, shape.tokens)
        self._labels = np.minimum(labels, min(shape.labels, shape.tokens))
        self._known: tuple[int, list[list[int]]] | None = None

    def rows(self, epoch: int) -> list[list[int]]:
        """Return the rows of an epoch, each a list of indices of conversations."""
        if self._known is None or self._known[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(self._chosen)
            rows: list[list[int]] = []
            for first in range(0, len(order), _WINDOW):
                rows += self._pack(order[first : first + _WINDOW])
            self._known = (epoch, [rows[index] for index in rng.permutation(len(rows))])
        return self._known[1]

    def advance(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        """Yield the rows from a position on, each with the position after it, without end."""
        epoch, row = position
        while True:
            rows = self.rows(epoch)
            while row < len(rows):
                row += 1
                yield rows[row - 1], Position(epoch, row)
            epoch, row = epoch + 1, 0

    @property
    def conversations(self) -> int:
        """The number of packed conversations."""
        return len(self._chosen)

    @property
    def tokens(self) -> int:
        """The number of packed tokens, with conversations truncated to the length of a row."""
        return int(self._lengths[self._chosen].sum())

    def fill_rate(self) -> float:
        """The fraction of tokens in the first epoch that are not padding."""
        return self.tokens / (len(self.rows(0)) * self._shape.tokens)

    def _pack(self, order: np.ndarray) -> list[list[int]]:
        """Return rows packed by best fit, starting with the longest conversations.

        Each conversation goes into the row that then has the least room left for tokens and labels.
        """
        count = len(order)
        sizes = np.stack([self._lengths[order], self._labels[order]], axis=1).astype(np.int64)
        limits = np.array([self._shape.tokens, self._shape.labels])
        share = (sizes / limits[None, :]).max(axis=1)
        room = np.broadcast_to(limits[None, :], (count, 2)).copy()
        rows: list[list[int]] = []
        for index in np.argsort(-share, kind="stable"):
            left = room[: len(rows)] - sizes[index][None, :]
            fits = (left >= 0).all(axis=1)
            if fits.any():
                waste = np.where(fits, (left / limits[None, :]).sum(axis=1), np.inf)
                into = int(waste.argmin())
            else:
                into = len(rows)
                rows.append([])
            room[into] -= sizes[index]
            rows[into].append(int(order[index]))
        return rows
