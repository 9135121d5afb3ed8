"""The logger `specjax`, which announces long operations on stderr.

It stays silent if the application configures logging itself, or after
`logging.getLogger("specjax").setLevel("WARNING")`.
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
        """Write a record, unless the root logger has handlers and so writes it too."""
        if not logging.getLogger().handlers:
            super().emit(record)


LOGGER = logging.getLogger("specjax")
if not LOGGER.handlers:
    LOGGER.addHandler(_Stderr())
    LOGGER.handlers[0].setFormatter(logging.Formatter("specjax: %(message)s"))
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
