"""Handling of Ctrl-C, SIGTERM and a closed terminal: all are requests to end a command."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_APART_S = 1.0
"""`timeout` and process groups send a signal twice: sooner than this it is the same request."""


@contextmanager
def received_by(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` with the signal's number at each request to end; restored afterwards.

    What the process ignored before (`nohup`, a shell's background job) it still ignores, but by a
    handler, which child processes do not inherit. Signals reach the main thread alone: in another
    one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that is not Python's own is None here, and could not be restored.
    found = {number: signal.getsignal(number) for number in _NUMBERS}
    before = {number: handler for number, handler in found.items() if handler is not None}
    ignored = frozenset(number for number, handler in before.items() if _ignores(handler, number))
    handler = _Handler(receive, ignored)
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Handler:
    """A signal handler, and the signals that were ignored when it was installed."""

    def __init__(self, receive: Callable[[int], None], ignored: frozenset[int]) -> None:
        self._receive, self.ignored, self._last = receive, ignored, float("-inf")

    def __call__(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number not in self.ignored and now - self._last >= _APART_S:
            self._last = now
            self._receive(number)


def _ignores(handler: Any, number: int) -> bool:
    if isinstance(handler, _Handler):
        return number in handler.ignored
    return handler == signal.SIG_IGN


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread at each request to end."""

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with received_by(interrupt):
        yield


@contextmanager
def held_off() -> Iterator[None]:
    """Ignore requests to end during quick work that must be completed, such as a last report."""
    with received_by(lambda number: None):
        yield


def installed_again() -> None:
    """Install Python's handlers again where a library has replaced them."""
    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, handler)
