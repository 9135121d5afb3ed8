"""The logger `specjax`: what takes long is said on stderr, unless a user's own logging says it.

`logging.getLogger("specjax").setLevel("WARNING")` turns it off.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is now, and only where no logging is configured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The current stderr."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the root logger has handlers, which get it too."""
        if not logging.getLogger().handlers:
            super().emit(record)


LOGGER = logging.getLogger("specjax")
if not LOGGER.handlers:
    LOGGER.addHandler(_Stderr())
    LOGGER.handlers[0].setFormatter(logging.Formatter("specjax: %(message)s"))
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
