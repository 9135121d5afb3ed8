"""Conversations packed into rows of fixed shape, prefetched by a thread, in a seeded order.

The order of an epoch is a pure function of seed, epoch and the conversations' lengths, so that a
position in it is two numbers, and every process knows all rows without reading those of others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.errors import InputError
from train.data.examples import Example

_CONTEXT = 2
"""Tokens that must stand before a label: every method drafts from a committed pair."""
_WINDOW = 4096
"""Conversations that are packed against each other; more would only cost time."""

Rows = Array | np.ndarray


@struct.dataclass
class Batch:
    """Packed conversations; losses are computed at `labels` only.

    `positions` count from 0 in each conversation; `segments` are 0 for padding and 1, 2, ... for
    the conversations of a row. `labels` are the positions in the row of the tokens to be predicted,
    in order, -1 where there are no more. `features` are the target's, of the same positions.
    """

    tokens: Int[Rows, "B T"]
    positions: Int[Rows, "B T"]
    segments: Int[Rows, "B T"]
    labels: Int[Rows, "B A"]
    features: dict[str, Float[Rows, "B T D"]]


@runtime_checkable
class Source(Protocol):
    """Conversations by number; what packing needs is known without reading them.

    `lengths` [n] are tokens, `num_labels` [n] those of them that the loss mask lets through.
    """

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int32 [n]."""

    @property
    def num_labels(self) -> np.ndarray:
        """Tokens of each conversation that count in the loss, int32 [n]."""

    def __getitem__(self, index: int) -> Example:
        """One of them."""


class Position(NamedTuple):
    """The next row to be read: its epoch, and its number in that epoch."""

    epoch: int
    row: int


@dataclass(frozen=True)
class Shape:
    """The shape of a batch: `rows` (B) of `tokens` (T) with up to `labels` (A) labels each.

    `width` is D, for the features that are read along.
    """

    rows: int
    tokens: int
    labels: int
    features: tuple[str, ...] = ()
    width: int = 0


class Packing:
    """Which conversations share a row, epoch by epoch.

    `chosen` are the conversations to pack. Those without a label within the row's length are
    left out, their number is `left_out`. Raises InputError where none is left.
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
        """The rows of an epoch, each a list of conversations."""
        if self._known is None or self._known[0] != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            order = rng.permutation(self._chosen)
            rows: list[list[int]] = []
            for first in range(0, len(order), _WINDOW):
                rows += self._pack(order[first : first + _WINDOW])
            self._known = (epoch, [rows[index] for index in rng.permutation(len(rows))])
        return self._known[1]

    def advance(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        """The rows from a position on, without end, each with the position after it."""
        epoch, row = position
        while True:
            rows = self.rows(epoch)
            while row < len(rows):
                row += 1
                yield rows[row - 1], Position(epoch, row)
            epoch, row = epoch + 1, 0

    @property
    def conversations(self) -> int:
        """How many conversations are packed."""
        return len(self._chosen)

    @property
    def tokens(self) -> int:
        """Their tokens, truncated at a row's length."""
        return int(self._lengths[self._chosen].sum())

    def fill_rate(self, epoch: int = 0) -> float:
        """The share of the rows' tokens that belong to conversations."""
        return self.tokens / (len(self.rows(epoch)) * self._shape.tokens)

    def label_fill_rate(self, epoch: int = 0) -> float:
        """The share of the rows' room for labels that is used."""
        used = int(self._labels[self._chosen].sum())
        return used / (len(self.rows(epoch)) * self._shape.labels)

    def _pack(self, order: np.ndarray) -> list[list[int]]:
        """Best fit, longest first: each goes where it leaves the least room, tokens and labels."""
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


def build(source: Source, rows: Sequence[Sequence[int]], shape: Shape) -> Batch:
    """The host's batch of the given rows of conversations."""
    count, length = len(rows), shape.tokens
    tokens, positions, segments = (np.zeros((count, length), np.int32) for _ in range(3))
    labels = np.full((count, shape.labels), -1, np.int32)
    features = {name: np.zeros((count, length, shape.width), np.float16) for name in shape.features}
    for row, conversations in enumerate(rows):
        start, filled = 0, 0
        for number, conversation in enumerate(conversations, start=1):
            example = source[conversation]
            here = slice(start, start + min(len(example.tokens), length - start))
            size = here.stop - here.start
            tokens[row, here] = example.tokens[:size]
            positions[row, here] = np.arange(size)
            segments[row, here] = number
            for name, into in features.items():
                into[row, here] = example.features[name][:size]
            found = _label_positions(example.loss_mask, size)[: shape.labels - filled]
            labels[row, filled : filled + len(found)] = start + found
            start, filled = here.stop, filled + len(found)
    return Batch(tokens, positions, segments, labels, features)


def _label_positions(loss_mask: np.ndarray, tokens: int) -> np.ndarray:
    positions = np.flatnonzero(loss_mask[:tokens])
    return positions[positions >= _CONTEXT]


class ReadAhead:
    """An iterator whose items a thread prepares, at most `depth` of them ahead.

    An exception in the thread is raised by `next`. Close it, or use it as a context manager.
    """

    def __init__(self, items: Iterator[Any], depth: int = 2) -> None:
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        item, error = self._ready.get()
        if error is not None:
            self._closed.set()
            raise error
        return item

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what it prepared is dropped."""
        self._closed.set()
        self._thread.join()

    def _work(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                if not self._hand_over(item, None):
                    return
            self._hand_over(None, StopIteration())
        except BaseException as error:
            self._hand_over(None, error)

    def _hand_over(self, item: Any, error: BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                pass
        return False


def stream(
    source: Source,
    packing: Packing,
    shape: Shape,
    position: Position,
    own_rows: Sequence[int],
    placement: Callable[[Batch], Any],
) -> Iterator[tuple[Any, Position]]:
    """Batches from a position on, without end: what `placement` makes of the process's own rows.

    `own_rows` are the numbers, within a batch, of the rows that this process reads. Each batch
    comes with the position after it.
    """
    following = packing.advance(position)
    while True:
        taken = [next(following) for _ in range(shape.rows)]
        rows = [taken[number][0] for number in own_rows]
        yield placement(build(source, rows, shape)), taken[-1][1]
