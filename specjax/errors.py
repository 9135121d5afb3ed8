"""The error that bad input raises, and the form in which values appear in it."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""`errno` of an OSError for a full disk, an exhausted quota, and a limit on the size of files."""
_LONGEST = 2000
"""The most characters of a message."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 400
_SHORT.maxlevel = 3


class InputError(ValueError):
    """Bad input; the message names the field, the value and the remedy on one line.

    Command lines print it without a traceback and exit with code 2. Parts of it may come from a
    file: line ends become spaces, other unprintable characters (a terminal's commands, halves of
    surrogate pairs) are escaped, and the middle of a very long message is left out.
    """

    def __init__(self, message: str) -> None:
        message = printable(message)
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)


class Problems:
    """Collects InputErrors of checks that do not depend on each other, to raise them as one."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect an InputError that is raised inside the block, and continue after it."""
        try:
            yield
        except InputError as error:
            self.add(str(error))

    def add(self, message: str) -> None:
        """Collect a message."""
        self._messages.append(message)

    def check(self) -> None:
        """Raise one InputError with all collected messages, if there are any."""
        if self._messages:
            raise InputError("; ".join(self._messages))


def printable(text: str) -> str:
    """Return a text for a terminal: its line ends as spaces, unprintable characters escaped."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else repr(char)[1:-1]


def one_line(error: Exception) -> str:
    """Return another library's message on one line; the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: Any, limit: int = 60) -> str:
    """Return a value's repr for an error message: on one line, at most about `limit` characters."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # a repr is the value's own code; Python prints no number of 5,000 digits
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
