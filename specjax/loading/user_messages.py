"""Messages to the user while loading: single lines on stderr, through Python's logging."""

from __future__ import annotations

import logging

from specjax.distributed import processes
from specjax.errors import printable

_LOGGER = logging.getLogger("specjax")


def note(line: str) -> None:
    """Log a line to the user, on stderr unless the application configures logging.

    Unprintable characters, which names in a file may contain, are escaped. With several processes
    only process 0 logs.
    """
    if processes.is_first():
        _LOGGER.warning("%s", printable(line))
