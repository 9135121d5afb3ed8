"""Requests as rows on the devices: the arrays from which a state is made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from specjax import sampling
from specjax.core.drafter import Sampling
from specjax.core.state import RUNNING, STOPPED, Rows
from specjax.distributed.sharding import place_keys, place_rows
from specjax.engine.sampling_params import SamplingParams
from specjax.engine.session import Session

RowArguments = tuple[Int[Array, "B S"], Rows, Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]]
"""The arrays of `initial_state.start`: tokens, fixed properties, lengths, status and rounds."""


@dataclass(frozen=True)
class Row:
    """One sample of a request, which is one row of a batch.

    `number` is that of the request, such as the index of its prompt in the input, and `sample` that
    of the sample in it. A row that was put back and resumes has `emitted` tokens already, in
    `rounds` rounds.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    sample: int = 0
    emitted: tuple[int, ...] = ()
    rounds: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens from which the row starts: the prompt, and what it has emitted."""
        return self.prompt + self.emitted

    def key(self, seed: int) -> Key[Array, ""]:
        """Return the key from which all draws of the row derive, in a call with this `seed`."""
        key = sampling.row_key(seed, self.number, self.sampling.seed, self.prompt)
        return sampling.sample_key(key, self.sample)


_FINISHED = Row(0, (0,), SamplingParams())


def session_row(session: Session, prompt: int) -> Row:
    """Return the row of the session's prompt with the index `prompt`."""
    return Row(prompt, session.prompts[prompt], session.requests[prompt])


def batch_arguments(session: Session, index: Sequence[int]) -> RowArguments:
    """Return the arrays of the session's prompts with the given indices.

    They are padded with finished rows to the session's number of rows.
    """
    rows = [session_row(session, prompt) for prompt in index]
    return row_arguments(session, rows, session.num_rows)


def row_arguments(session: Session, rows: Sequence[Row | None], batch: int) -> RowArguments:
    """Return the arrays of `batch` rows, the first of which are `rows`.

    The others, and None, are rows that have finished already.
    """
    given = [*rows, *[None] * (batch - len(rows))]
    rows = [_FINISHED if row is None else row for row in given]
    texts = [row.tokens for row in rows]
    prompt_lengths = np.array([len(row.prompt) for row in rows], np.int32)
    requests = [row.sampling for row in rows]
    tokens = np.zeros((batch, session.plan.capacity), np.int32)
    stop_ids = np.full((batch, session.num_stop_ids), -1, np.int32)
    for at, (ids, request) in enumerate(zip(texts, requests, strict=True)):
        tokens[at, : len(ids)] = ids
        stops = session.stop_ids(request)[: session.num_stop_ids]
        stop_ids[at, : len(stops)] = stops
    length = np.array([len(ids) for ids in texts], np.int32)
    rounds = np.array([row.rounds for row in rows], np.int32)
    numbers = np.array([row.number for row in rows], np.int32)
    room = np.array([request.max_new_tokens for request in requests], np.int64)
    unused = jax.random.key(session.seed)
    keys = [unused if row is None else row.key(session.seed) for row in given]
    status = np.array([STOPPED if row is None else RUNNING for row in given], np.int32)
    where = session.placement
    placed = functools.partial(place_rows, where=where)
    fixed = Rows(
        index=placed(numbers),
        prompt_length=placed(prompt_lengths),
        key=place_keys(keys, where),
        sampling=Sampling(
            temperature=placed(np.array([r.temperature for r in requests], np.float32)),
            top_k=placed(np.array([r.top_k for r in requests], np.int32)),
            top_p=placed(np.array([r.top_p for r in requests], np.float32)),
            min_p=placed(np.array([r.min_p for r in requests], np.float32)),
        ),
        max_length=placed(np.minimum(prompt_lengths + room, session.max_length).astype(np.int32)),
        stop_ids=placed(stop_ids),
    )
    return placed(tokens), fixed, placed(length), placed(status), placed(rounds)
