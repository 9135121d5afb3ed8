"""The error raised for bad input, and the formatting of values in its message."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Values of `OSError.errno` for a full disk, an exhausted quota, and a file that is too large."""
_LONGEST = 2000
"""The length at which messages are truncated, in characters."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 400
_SHORT.maxlevel = 3


class InputError(ValueError):
    """An error for invalid input; its message names the field, the value and the remedy.

    Commands print the message without a traceback and exit with code 2. It is a single line even if
    it quotes a file: line breaks become spaces, unprintable characters (terminal escapes, lone
    surrogates) are escaped, and the middle of a very long message is omitted.
    """

    def __init__(self, message: str) -> None:
        message = printable(message)
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)


class Problems:
    """The InputErrors of several independent checks, collected and raised as one."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect an InputError raised inside the `with` block instead of propagating it."""
        try:
            yield
        except InputError as error:
            self.add(str(error))

    def add(self, message: str) -> None:
        """Add a message to the collection."""
        self._messages.append(message)

    def check(self) -> None:
        """Raise one InputError with all collected messages, if there are any."""
        if self._messages:
            raise InputError("; ".join(self._messages))


def printable(text: str) -> str:
    """Return `text` with line breaks as spaces and other control characters escaped."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else repr(char)[1:-1]


def one_line(error: Exception) -> str:
    """Return an exception's message on one line, or its class name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: Any, limit: int = 60) -> str:
    """Return the repr of `value` on one line, truncated to `limit` characters."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # the value's class defines repr; Python refuses integers of 5,000 digits
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
