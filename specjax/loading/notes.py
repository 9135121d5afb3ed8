"""What loading tells its user: one line on stderr, through Python's logging."""

from __future__ import annotations

import logging

from specjax.distributed import processes

_LOGGER = logging.getLogger("specjax")


def note(line: str) -> None:
    """Say a line to the user; without a handler of the program's own it goes to stderr as it is.

    Unprintable characters, which a file's names may hold, are escaped. Of several processes the
    first says it.
    """
    if not processes.is_first():
        return
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    _LOGGER.warning("%s", shown)
