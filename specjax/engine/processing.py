"""Which processors the sampling parameters of requests need, and the arrays that these read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.processor import NewRows, Processor
from specjax.engine.requests import GRAMMARS, SamplingParams
from specjax.errors import InputError, one_line, shown
from specjax.grammars.token_table import DEAD, TokenTable
from specjax.processors import (
    ForcedTokens,
    Grammar,
    MinTokens,
    NoRepeatNgrams,
    Penalties,
    TokenBias,
)

_OWN_PROCESSOR = (
    "subclass specjax.processors.Processor as a frozen dataclass with a method apply(self, state, "
    "logits) -> logits, and pass an instance"
)
"""The instructions in error messages for users who write their own processor."""


@dataclass(frozen=True)
class ProcessorField:
    """The field type of a user's own processors."""

    def check(self, name: str, value: Any) -> Processor:
        """Return `value` if it is a processor that can be part of the key of a program.

        Raises InputError, which names the field `name`, otherwise.
        """
        try:
            hash(value)
        except TypeError:
            value_is_static = False
        else:
            value_is_static = True
        if not isinstance(value, Processor) or not value_is_static:
            raise InputError(f"{name}={shown(value)}: a processor is a value; {_OWN_PROCESSOR}")
        return value


_KINDS: dict[type[Processor], tuple[str, ...]] = {
    TokenBias: ("logit_bias", "allowed_token_ids", "banned_token_ids"),
    MinTokens: ("min_tokens",),
    NoRepeatNgrams: ("no_repeat_ngram_size",),
    Grammar: GRAMMARS,
    Penalties: ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    ForcedTokens: ("forced_token_ids",),
}
"""The sampling parameters that need a processor, by its class.

The processors are in the order in which they are applied, which is vLLM's.
"""
PROCESSED = tuple(itertools.chain(*_KINDS.values()))
"""The sampling parameters that need some processor."""


def processors_of(
    sampling: Sequence[SamplingParams], tables: Sequence[TokenTable | None] = ()
) -> tuple[Processor, ...]:
    """Return the processors that some of the requests need, in the order of their application.

    `tables` are those of their grammars.
    """
    default = SamplingParams()

    def asked(name: str) -> bool:
        return any(getattr(params, name) != getattr(default, name) for params in sampling)

    found = [kind for kind, names in _KINDS.items() if any(map(asked, names))]
    shapes = [table.successors for table in tables if table is not None]
    grammars = [
        Grammar(_rounded(one.shape[0]), _rounded(one.shape[1]), _rounded(one.size, 4096))
        for one in shapes
    ]
    return union([kind() for kind in found], grammars)


def _rounded(size: int, least: int = 64) -> int:
    """Return the least power of four that is at least `size` and `least`: programs are shared."""
    return 1 << 2 * math.ceil(math.log2(max(size, least)) / 2)


def union(first: Sequence[Processor], second: Sequence[Processor]) -> tuple[Processor, ...]:
    """Return the processors in either of two sequences, a user's own of the first one first.

    A grammar has room for the tables of both.
    """
    own = [processor for processor in first if type(processor) not in _KINDS]
    joined = []
    for kind in _KINDS:
        given = [processor for processor in (*first, *second) if type(processor) is kind]
        if given and kind is Grammar:
            sizes = [dataclasses.astuple(one) for one in given]
            given = [Grammar(*map(max, *sizes))] if len(sizes) > 1 else given
        joined += given[:1]
    return (*own, *joined)


def carried_over(
    before: Sequence[Processor],
    states: Sequence[Any],
    after: Sequence[Processor],
    fresh: Sequence[Any],
) -> tuple[Any, ...]:
    """Return the states of the processors `after`, those of rows that had the processors `before`.

    `states` are theirs until now. `fresh` are those of rows that ask for nothing, which they have
    of processors that they did not have.
    """
    kept = dict(zip(before, states, strict=True))
    grammar = next((state for one, state in kept.items() if isinstance(one, Grammar)), None)
    return tuple(
        jax.tree.map(_within, grammar, new)
        if isinstance(one, Grammar) and grammar is not None
        else kept.get(one, new)
        for one, new in zip(after, fresh, strict=True)
    )


def _within(old: Array, new: Array) -> Array:
    """Return `old` with the padding that the larger array `new` has."""
    return jax.lax.dynamic_update_slice(new, old, [0] * old.ndim)


def requested_arrays(
    processors: Sequence[Processor],
    sampling: Sequence[SamplingParams],
    stop_ids: Int[np.ndarray, "B stops"],
    capacity: int,
    vocab_size: int,
    tables: Sequence[TokenTable | None] = (),
    room: Int[np.ndarray, "B"] | None = None,
) -> tuple[Any, ...]:
    """Return the `NewRows.requested` of each processor for rows with these sampling parameters.

    `stop_ids` are the tokens that end each row, padded with -1, and rows have up to `capacity`
    tokens. `tables` are those of the rows' grammars, and `room` is the most new tokens of each.
    """

    def numbers(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(params, name) for params in sampling], dtype)

    def of(processor: Processor) -> Any:
        if processor == TokenBias():
            return np.stack([_bias(params, vocab_size) for params in sampling])
        if processor == MinTokens():
            return {"least": numbers("min_tokens", np.int32), "stop_ids": stop_ids}
        if processor == NoRepeatNgrams():
            return numbers("no_repeat_ngram_size", np.int32)
        if isinstance(processor, Grammar):
            return _padded_tables(processor, tables, room, vocab_size)
        if processor == Penalties():
            return {
                name: numbers(f"{name}_penalty", np.float32)
                for name in ("repetition", "presence", "frequency")
            }
        if processor == ForcedTokens():
            forced = np.full((len(sampling), capacity), -1, np.int32)
            for row, params in enumerate(sampling):
                ids = params.forced_token_ids[:capacity]
                forced[row, : len(ids)] = ids
            return forced
        return ()

    return tuple(map(of, processors))


def _padded_tables(
    processor: Grammar,
    tables: Sequence[TokenTable | None],
    room: Int[np.ndarray, "B"],
    vocab_size: int,
) -> dict[str, np.ndarray]:
    """Return the arrays that a grammar reads: each row's table, and its most new tokens."""
    rows, states = len(tables), processor.num_states
    padded = {
        "classes": np.zeros((rows, vocab_size), np.int32),
        "successors": np.zeros((rows, processor.num_entries), np.int16),
        "least": np.zeros((rows, states), np.int32),
        "drafts": np.full((rows, states), DEAD, np.int32),
    }
    width = np.ones(rows, np.int32)
    for row, table in enumerate(tables):
        if table is None:
            continue
        width[row] = table.successors.shape[1]
        for name, array in padded.items():
            own = getattr(table, name).reshape(-1)
            array[row, : len(own)] = own
    # Without a grammar each token leads from state 0 to state 0, and no limit matters.
    free = np.array([table is None for table in tables], bool)
    room = np.where(free, np.iinfo(np.int32).max, room).astype(np.int32)
    return padded | {"width": width, "room": room}


def _bias(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """Return the bias [V] of each token: -inf for those that are banned or not allowed."""
    bias = np.zeros(vocab_size, np.float32)
    for token, value in params.logit_bias:
        bias[token] = value
    if params.allowed_token_ids:
        others = np.ones(vocab_size, bool)
        others[list(params.allowed_token_ids)] = False
        bias[others] = -np.inf
    bias[list(params.banned_token_ids)] = -np.inf
    return bias


def check_processing(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for tokens outside the vocabulary, and if a request allows no token."""
    named = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "banned_token_ids": sampling.banned_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "forced_token_ids": sampling.forced_token_ids,
    }
    for name, tokens in named.items():
        if tokens and max(tokens) >= vocab_size:
            raise InputError(
                f"sampling.{name}: token id {max(tokens)} is outside the vocabulary of "
                f"{vocab_size} tokens; leave it out"
            )
    banned, left = set(sampling.banned_token_ids), vocab_size
    if sampling.allowed_token_ids is not None:
        left = len(set(sampling.allowed_token_ids) - banned)
    elif banned:
        left = vocab_size - len(banned)
    if not left:
        raise InputError(
            f"sampling.banned_token_ids={shown(sampling.banned_token_ids)}: no allowed token is "
            "left; ban fewer"
        )


def check_unprocessed(sampling: SamplingParams) -> None:
    """Raise InputError for parameters that need a processor, where distributions have none."""
    default = SamplingParams()
    for name in PROCESSED:
        value = getattr(sampling, name)
        if value != getattr(default, name):
            raise InputError(
                f"sampling.{name}={shown(value)}: distributions are compared without it; leave it "
                "out"
            )


def check_shapes(
    processor: Processor, rows: int, capacity: int, vocab_size: int, requested: Any = ()
) -> None:
    """Raise InputError unless a processor's methods return the required types and shapes.

    They are called as in a round of `rows` rows of up to `capacity` tokens, but evaluated
    abstractly. `requested` are the arrays that `init` reads.
    """
    prefix = f"processor {shown(processor)}"
    tokens = jax.ShapeDtypeStruct((rows, capacity), jnp.int32)
    count = jax.ShapeDtypeStruct((rows,), jnp.int32)
    logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)

    def states(tokens: Any, count: Any, requested: Any) -> Any:
        state = processor.init(NewRows(tokens, count, vocab_size, requested))
        return state, processor.advance(state, tokens, count)

    try:
        before, after = jax.eval_shape(states, tokens, count, requested)
        returned = jax.eval_shape(processor.apply, before, logits)
        allowed = jax.eval_shape(processor.allows, before, count)
    except Exception as error:  # a processor is the user's own code and may raise anything
        raise InputError(
            f"{prefix} fails ({type(error).__name__}: {one_line(error):.200}); {_OWN_PROCESSOR}"
        ) from error
    if _forms(before) != _forms(after):
        raise InputError(
            f"{prefix}: advance returns {shown(after, 120)} where init made {shown(before, 120)}; "
            "return the same arrays, shapes and dtypes"
        )
    if any(leaf.shape[:1] != (rows,) for leaf in jax.tree.leaves(before)):
        raise InputError(
            f"{prefix}: init makes {shown(before, 120)}; let each array have rows as its first axis"
        )
    if getattr(returned, "shape", None) != logits.shape or returned.dtype != logits.dtype:
        raise InputError(
            f"{prefix}: apply returns {shown(returned, 120)}; return logits as it gets them"
        )
    if getattr(allowed, "shape", None) != (rows,) or allowed.dtype != bool:
        raise InputError(
            f"{prefix}: allows returns {shown(allowed, 120)}; return a boolean for each row"
        )


def _forms(state: Any) -> tuple[Any, ...]:
    """Return the structure, shapes and dtypes of a state."""
    leaves, structure = jax.tree.flatten(state)
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
