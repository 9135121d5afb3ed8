"""The logger `specjax`, which announces long operations on stderr.

It is silent if the application configures logging itself, or after
`logging.getLogger("specjax").setLevel("WARNING")`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class _Stderr(logging.StreamHandler):
    """A handler that writes to the current `sys.stderr`, unless logging is configured elsewhere."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The stream that `sys.stderr` is now."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record`, unless the root logger has handlers, which write it too."""
        if not logging.getLogger().handlers:
            super().emit(record)


LOGGER = logging.getLogger("specjax")
if not LOGGER.handlers:
    LOGGER.addHandler(_Stderr())
    # The format of `basicConfig`, which absl calls once a library logs: lines look the same after.
    LOGGER.handlers[0].setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
