"""Batches of packed conversations, built on the host and prefetched by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from train.data.packing import Shape, Source

CONTEXT = 2
"""The minimum number of tokens before a label, since every method drafts from a committed pair."""
Rows = Array | np.ndarray
Item = TypeVar("Item")


@struct.dataclass
class Batch:
    """Packed conversations; losses are computed at `labels` only.

    `positions` count from 0 in each conversation; `segments` are 0 for padding and 1, 2, ... for
    the conversations of a row. `labels` are the row positions of the tokens to predict, in order,
    padded with -1. `features` are the target's features at each position of a row.
    """

    tokens: Int[Rows, "B T"]
    positions: Int[Rows, "B T"]
    segments: Int[Rows, "B T"]
    labels: Int[Rows, "B A"]
    features: dict[str, Float[Rows, "B T D"]]


def build(source: Source, rows: Sequence[Sequence[int]], shape: Shape) -> Batch:
    """Return the batch of some rows as NumPy arrays of the given shape.

    Each row is a list of the indices, in `source`, of the conversations that it contains.
    """
    count, length = len(rows), shape.tokens
    tokens, positions, segments = (np.zeros((count, length), np.int32) for _ in range(3))
    labels = np.full((count, shape.labels), -1, np.int32)
    features = {name: np.zeros((count, length, shape.width), np.float16) for name in shape.features}
    for row, conversations in enumerate(rows):
        start, filled = 0, 0
        for number, conversation in enumerate(conversations, start=1):
            example = source[conversation]
            size = min(len(example.tokens), length - start)
            here = slice(start, start + size)
            tokens[row, here] = example.tokens[:size]
            positions[row, here] = np.arange(size)
            segments[row, here] = number
            for name, values in features.items():
                values[row, here] = example.features[name][:size]
            of_example = np.flatnonzero(example.loss_mask[:size])
            of_example = of_example[of_example >= CONTEXT][: shape.labels - filled]
            labels[row, filled : filled + len(of_example)] = start + of_example
            start, filled = here.stop, filled + len(of_example)
    return Batch(tokens, positions, segments, labels, features)


def read_ahead(items: Iterator[Item], depth: int = 2) -> Iterator[Item]:
    """Yield the items of an iterator, which a thread prepares up to `depth` items ahead.

    An exception in the thread is raised here, in place of the item that failed. Closing this
    iterator ends the thread.
    """
    worker = ThreadPoolExecutor(1)
    try:
        waiting = deque(worker.submit(next, items) for _ in range(depth))
        while True:
            item = waiting.popleft().result()
            waiting.append(worker.submit(next, items))
            yield item
    finally:
        worker.shutdown(cancel_futures=True)
