"""The logger `specjax`, which announces long operations on stderr.

It is silent if the application configures logging itself, or after
`logging.getLogger("specjax").setLevel("WARNING")`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

QUIET_S = 10.0
"""The minimum seconds between two lines of progress of one operation."""


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


@contextmanager
def shown_by(tell: Callable[[str], Any]) -> Iterator[None]:
    """Pass lines about long operations to `tell` while in the context, instead of logging them.

    These are the lines of `LOGGER` below the level WARNING. Warnings are logged as usual.
    """

    def take(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        tell(record.getMessage())
        return False

    before = LOGGER.level
    LOGGER.addFilter(take)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(before)
        LOGGER.removeFilter(take)


def share_logger(doing: str) -> Callable[[float], None]:
    """Return a function that logs which share of an operation is done, and the time left.

    It is called with a share from 0 to 1 as often as there is one, and logs a line, beginning with
    `doing`, at most every `QUIET_S` seconds.
    """
    begin = latest = time.monotonic()

    def log(share: float) -> None:
        nonlocal latest
        now = time.monotonic()
        if now - latest < QUIET_S or not 0 < share < 1:
            return
        latest = now
        left = (now - begin) * (1 - share) / share
        LOGGER.info("%s: %.0f %%, about %s left", doing, 100 * share, duration(left))

    return log


def duration(seconds: float) -> str:
    """Return a number of seconds as text, such as "1 h 5 min", "12 min" or "3 min 20 s"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return (
        f"{minutes} min" if minutes >= 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
    )
