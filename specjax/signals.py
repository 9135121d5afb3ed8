"""Handlers for Ctrl-C, SIGTERM and SIGHUP, all treated as requests to stop a command."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_APART_S = 1.0
"""Seconds within which a repeated signal counts as the same request; `timeout` sends two."""
_LATER_S = 0.01
"""Seconds after which a signal that comes during garbage collection is sent again."""


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
    handler = _Handler(receive, ignored)
    try:
        for number in restorable:
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in restorable.items():
            signal.signal(number, earlier)


class _Handler:
    """A signal handler, and the signals that were ignored when it was installed."""

    def __init__(self, receive: Callable[[int], None], ignored: frozenset[int]) -> None:
        self._receive, self.ignored, self._last = receive, ignored, float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self.ignored or now - self._last < _APART_S:
            return
        if _collects_garbage(frame):
            # Python prints what is raised in such a callback (JAX has one), and goes on.
            again = threading.Timer(_LATER_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        self._last = now
        self._receive(number)


def _collects_garbage(frame: FrameType | None) -> bool:
    """Return whether a callback of the garbage collector is running in `frame`."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None


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
