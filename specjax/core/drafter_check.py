"""The check of a drafter that is passed as a value rather than by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import OWN_DRAFTER, Drafter, LoadedDrafter
from specjax.core.merged import Merged
from specjax.core.turn_taking import Turns, take_turns
from specjax.errors import InputError, one_line, shown

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
        for drafter in _with_merged_parts(turns.drafter):
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


def _with_merged_parts(turns: Turns) -> Iterator[Drafter]:
    """Yield the drafters that take turns, and the parts of merged ones."""
    for drafter in turns.parts:
        yield drafter
        if isinstance(drafter, Merged):
            yield from drafter.parts


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


DRAFTER_KIND = DrafterKind()
"""The check of arguments that take a drafter."""
