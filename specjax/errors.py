"""The error that bad input raises, and how values are shown in it."""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The numbers of an OSError for a full disk, a used up quota, and a limit on the size of files."""
_LONGEST = 2000
"""Characters of a message."""


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
        if not message.isprintable():
            message = "".join(map(_printable, message))
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__(message)


class Problems:
    """Collects InputErrors of checks that do not depend on each other, to raise them as one."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note an InputError that is raised inside, and continue after the block."""
        try:
            yield
        except InputError as error:
            self.add(str(error))

    def add(self, message: str) -> None:
        """Note a message."""
        self._found.append(message)

    def check(self) -> None:
        """Raise one InputError that lists all that were noted, if any was."""
        if self._found:
            raise InputError("; ".join(self._found))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else repr(char)[1:-1]


def one_line(error: Exception) -> str:
    """Another library's message as a part of one of ours; its class's name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def shown(value: Any, limit: int = 60) -> str:
    """A value as an error shows it: its repr on one line, of about `limit` characters at most."""
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # a repr is the value's own code; Python prints no number of 5,000 digits
        text = f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
