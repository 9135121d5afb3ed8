"""What loading tells its user: one line on stderr, through Python's logging."""

from __future__ import annotations

import logging

from specjax.distributed import processes
from specjax.errors import printable

_LOGGER = logging.getLogger("specjax")


def note(line: str) -> None:
    """Say a line to the user; without a handler of the program's own it goes to stderr as it is.

    Unprintable characters, which a file's names may hold, are escaped. Of several processes the
    first says it.
    """
    if processes.is_first():
        _LOGGER.warning("%s", printable(line))
