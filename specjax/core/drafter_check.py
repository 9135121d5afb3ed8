"""The checks of drafters that users write: of their class, their states and their drafts.

What `propose` and `observe` return is checked in each trace besides (`core.turn_taking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import OWN_DRAFTER, Drafter, LoadedDrafter
from specjax.core.merged import Merged
from specjax.core.state import knows_its_rows
from specjax.core.turn_taking import Turns, take_turns
from specjax.errors import InputError, one_line, shown
from specjax.trees import Draft
from specjax.trees.draft import check_draft

_NORMALISED = 1e-2
"""The tolerance for sums of probabilities, wide enough for half precision."""
_METHODS = {
    "init": ("params", "batch", "capacity"),
    "propose": ("params", "state", "context", "noise"),
    "observe": ("params", "state", "context", "accepted"),
}
"""The methods of a drafter, and the arguments that the loop passes to each."""


@dataclass(frozen=True)
class DrafterKind:
    """The field type of a drafter: a `Drafter`, or a `LoadedDrafter` with its parameters."""

    def check(self, name: str, value: Any) -> LoadedDrafter:
        """Return `value` as drafters that take turns (often just one), with their parameters.

        Raises InputError for any other value, and for a drafter without `propose`, with a method of
        other arguments, with `with_outputs` but no `text_digests`, with fields that are not
        hashable, or with an invalid number of tokens. Parts of merged drafters are checked, too.
        """
        loaded = LoadedDrafter(value) if isinstance(value, Drafter | Turns) else value
        pair = isinstance(loaded, tuple) and len(loaded) == 2
        if not pair or not isinstance(loaded[0], Drafter | Turns):
            raise InputError(f"{name}={shown(value)}: use a name, or {OWN_DRAFTER}")
        turns = take_turns(LoadedDrafter(*loaded))
        parts = [part for (part,) in single_drafters(turns.drafter.parts)]
        # A merged drafter is of some class, too.
        for drafter in (*turns.drafter.parts, *parts):
            DRAFT_TOKENS.check(f"{name}.num_speculative_tokens", drafter.num_speculative_tokens)
            if type(drafter).propose is Drafter.propose:
                kind = type(drafter).__name__
                raise InputError(f"{name}={shown(drafter, 120)}: no {kind}.propose; {OWN_DRAFTER}")
            _check_arguments(name, drafter)
            _check_texts(name, type(drafter))
        try:
            hash(turns.drafter)
        except TypeError as error:
            raise InputError(
                f"{name}={shown(value, 120)}: {one_line(error)}: fields are static, and arrays "
                "belong into the params of LoadedDrafter(drafter, params)"
            ) from error
        if len(turns.params) != len(turns.drafter.parts):
            raise InputError(
                f"{name}: {turns.drafter.name} has {len(turns.drafter.parts)} drafters and "
                f"{len(turns.params)} params; give each its own"
            )
        return turns


def _check_texts(name: str, kind: type[Drafter]) -> None:
    """Raise InputError for a class whose drafts may know the noise that verifies them.

    An output that it copies may have been drawn with the same seed.
    """
    copies_outputs = kind.with_outputs is not Drafter.with_outputs
    if copies_outputs and kind.text_digests is Drafter.text_digests:
        raise InputError(
            f"{name}: {kind.__name__}.with_outputs keeps outputs to copy from, and its "
            "text_digests names no text; return there the sampling.text_digest(tokens, "
            "after=earlier) that with_outputs made"
        )


def _check_arguments(name: str, drafter: Drafter) -> None:
    for method, arguments in _METHODS.items():
        try:
            inspect.signature(getattr(drafter, method)).bind(*arguments)
        except TypeError as error:
            called = f"{type(drafter).__name__}.{method}"
            raise InputError(
                f"{name}: {called}: {one_line(error)}; define it with the arguments (self, "
                f"{', '.join(arguments)})"
            ) from error


def check_rows_first(drafter: Drafter, params: Any) -> None:
    """Raise InputError unless every array of a drafter's state has rows as its first axis.

    Caches and windows are exempt, since they know their rows.
    """
    for rows in (3, 5):
        init = lambda params, rows=rows: drafter.init(params, rows, 8)  # noqa: E731
        state = jax.eval_shape(init, params)
        for leaf in jax.tree.leaves(state, is_leaf=knows_its_rows):
            if not knows_its_rows(leaf) and leaf.shape[:1] != (rows,):
                raise InputError(
                    f"drafter {drafter.name!r}: its state holds an array of shape "
                    f"{list(leaf.shape)} for {rows} rows; every array needs rows as its first axis"
                )


def check_contents(drafter: Drafter, draft: Draft, limit: Int[Array, "B"], vocab_size: int) -> None:
    """Raise InputError if the arrays of a draft break the contract, in ways that no shape shows.

    Tokens must be in the vocabulary, no path longer than the row's `limit`, valid nodes closed
    under ancestors, and log-probabilities normalised.
    """
    check_draft(draft, f"drafter {drafter.name!r}: propose returned")
    valid, tokens = np.asarray(draft.valid), np.asarray(draft.tokens)
    unknown = valid & ((tokens < 0) | (tokens >= vocab_size))
    if unknown.any():
        raise InputError(
            f"drafter {drafter.name!r}: proposes token {tokens[unknown][0]}, out of range "
            f"0..{vocab_size - 1}; make such nodes invalid"
        )
    depths = np.where(valid, draft.topology.row_depths[:, 1:], 0).max(axis=1, initial=0)
    if (depths > limit).any():
        row = int(np.argmax(depths > limit))
        raise InputError(
            f"drafter {drafter.name!r}: proposes more than its limit, {depths[row]} tokens where "
            f"context.limit is {limit[row]}; make the nodes beyond it invalid"
        )
    if not (np.asarray(draft.topology.close(draft.valid)) == valid).all():
        raise InputError(
            f"drafter {drafter.name!r}: its valid nodes are not closed under ancestors: a node "
            "whose parent was never proposed cannot be verified; make it invalid"
        )
    if draft.logq is not None:
        row = np.asarray(draft.logq_row)
        mass = np.exp(np.asarray(draft.logq, np.float32)).sum(axis=2)
        mass = np.where(row >= 0, np.take_along_axis(mass, np.maximum(row, 0), axis=1), 1)
        # A distribution without tokens is left out by the loop, as is one with NaN.
        off = valid & (np.abs(mass - 1) >= _NORMALISED) & (mass > 0)
        if off.any():
            index, node = np.argwhere(off)[0]
            raise InputError(
                f"drafter {drafter.name!r}: propose returned logq[{index}, {row[index, node]}] "
                f"whose probabilities sum to {mass[index, node]:.4g}; return log-probabilities, "
                "such as context.draw gives"
            )


def single_drafters(drafters: tuple[Drafter, ...], *values: tuple) -> Iterator[tuple]:
    """Yield each drafter with its entries of `values`, and the parts of merged ones in its place.

    `values` are tuples of parameters or states, nested like the drafters.
    """
    for drafter, *own in zip(drafters, *values, strict=True):
        if isinstance(drafter, Merged):
            yield from single_drafters(drafter.parts, *own)
        else:
            yield drafter, *own


DRAFTER_KIND = DrafterKind()
"""The check of arguments that take a drafter."""
