"""Errors of user-defined drafters: what a failure while JAX traces them says to their author."""

from __future__ import annotations

import contextlib
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from specjax.errors import InputError, one_line

_NOT_THE_USERS = frozenset(
    ("specjax", "jax", "jaxlib", "flax", "numpy", "jaxtyping", "beartype", "contextlib")
)
"""The packages whose lines are of no help to the author of a drafter."""


@contextlib.contextmanager
def errors_of(drafter: str) -> Iterator[None]:
    """Turn any error in the context into an InputError that names a drafter and the user's line.

    InputErrors stay as they are.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a drafter is the user's own code and may raise anything
        cure = "docs/extending.md says what init, propose and observe get and return"
        said = textwrap.shorten(one_line(error), 200, placeholder=" ...")
        if isinstance(error, jax.errors.ConcretizationTypeError):
            # JAX's own text is long, and names the lines of specjax that trace the drafter.
            said = "the values of arrays are unknown while JAX traces it"
            cure = "use jnp.where in place of `if`; " + cure
        raise InputError(
            f"drafter {drafter!r}: fails in a round{_users_line(error)} "
            f"({type(error).__name__}: {said}); {cure}"
        ) from error


def _users_line(error: Exception) -> str:
    """Return where the user's own code raised an error, as text that follows a verb, or ""."""
    theirs = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_THE_USERS:
            theirs = f" at {Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"
    return theirs
