"""Handlers for Ctrl-C, SIGTERM and SIGHUP, all treated as requests to stop a command."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_APART_S = 1.0
"""Seconds within which a repeated signal counts as the same request; `timeout` sends two."""
_LATER_S = 0.01
"""Seconds after which a signal is sent again whose KeyboardInterrupt was lost."""


@contextmanager
def received_by(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` with the signal's number whenever a signal asks the process to stop.

    The previous handlers are restored when the `with` block ends. Signals that the process ignored
    before (`nohup`, background jobs) stay without effect, but by means of a handler, which child
    processes do not inherit. Does nothing outside the main thread, the only one that receives
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that was not installed from Python is None here, and could not be restored.
    handlers = {number: signal.getsignal(number) for number in _NUMBERS}
    restorable = {number: handler for number, handler in handlers.items() if handler is not None}
    ignored = frozenset(
        number for number, handler in restorable.items() if _ignores(handler, number)
    )
    handler, report = _Handler(receive, ignored), sys.unraisablehook

    def unraisable(lost: Any) -> None:
        # Python goes on after what is raised while garbage is collected: in callbacks of weak
        # references, in __del__, and in JAX's callback of the collector.
        if issubclass(lost.exc_type, KeyboardInterrupt):
            handler.send_again()
        else:
            report(lost)

    try:
        sys.unraisablehook = unraisable
        for number in restorable:
            signal.signal(number, handler)
        yield
    finally:
        sys.unraisablehook = report
        for number, earlier in restorable.items():
            signal.signal(number, earlier)


class _Handler:
    """A signal handler, and the signals that were ignored when it was installed."""

    def __init__(self, receive: Callable[[int], None], ignored: frozenset[int]) -> None:
        self._receive, self.ignored, self._last = receive, ignored, float("-inf")
        self._number = signal.SIGINT

    def __call__(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number not in self.ignored and now - self._last >= _APART_S:
            self._last, self._number = now, number
            self._receive(number)

    def send_again(self) -> None:
        """Send the latest signal again in a moment; it counts as a new request."""
        self._last = float("-inf")
        later = threading.Timer(_LATER_S, os.kill, (os.getpid(), self._number))
        later.daemon = True
        later.start()


def _ignores(handler: Any, number: int) -> bool:
    """Return whether a handler has no effect for a signal."""
    if isinstance(handler, _Handler):
        return number in handler.ignored
    return handler == signal.SIG_IGN


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread when a signal asks the process to stop."""

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with received_by(interrupt):
        yield


@contextmanager
def held_off() -> Iterator[None]:
    """Ignore, in the context, signals that ask to stop, for short work such as writing a report."""
    with received_by(lambda number: None):
        yield


def installed_again() -> None:
    """Install Python's signal handlers again, since a library may have replaced them."""
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, handler)
