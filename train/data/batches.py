"""Batches of packed conversations, made on the host and prefetched by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from train.data.packing import Packing, Position, Shape, Source

_CONTEXT = 2
"""Tokens that must stand before a label: every method drafts from a committed pair."""
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
