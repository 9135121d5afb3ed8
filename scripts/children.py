"""Commands in processes of their own, none of which is left behind; what some scripts share."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

INTERRUPTED = "interrupted; the same command goes on from here"
"""What Ctrl-C says where finished work is kept."""

GRACE_S = 120.0
"""How long a process has to save what it has."""

_LOOK_S, _APART_S = 0.25, 1.0


def run_child(
    command: Sequence[str],
    *,
    log: IO[str] | None = None,
    until: float = math.inf,
    keep: Sequence[int] = (),
) -> int | None:
    """Run a command in a process of its own; returns its exit code, None where its time was over.

    Ctrl-C, SIGTERM and a closed terminal reach it as Ctrl-C, as does `until`, a time of
    `time.monotonic`. It then has GRACE_S to end, and where it was not the time, KeyboardInterrupt
    is raised; asked a second time, it is killed. What it says goes to `log`; `keep` are file
    descriptors that it inherits.
    """
    with _listening() as asked:
        # A session of its own, so that a terminal's Ctrl-C reaches it once, by way of this process.
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keep,
        )
        try:
            while child.poll() is None and not asked and time.monotonic() < until:
                _wait(child)
            code = child.poll()
            if code is None:
                child.send_signal(signal.SIGINT)
            end = time.monotonic() + GRACE_S
            while child.poll() is None and len(asked) < 2 and time.monotonic() < end:
                _wait(child)
        finally:
            child.kill()
            child.wait()
    if asked:
        raise KeyboardInterrupt
    return code


def _wait(child: subprocess.Popen) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(_LOOK_S)


@contextmanager
def _listening() -> Iterator[list[float]]:
    """When this process is asked to end; what was ignored is ignored still.

    Nothing is raised where a signal comes, so that none comes at a wrong moment. Shells let a
    background job ignore Ctrl-C, and a child would inherit that: it does not where there is a
    handler, which a new program never inherits.
    """
    asked: list[float] = []

    def hear(number: int, frame: Any) -> None:
        now = time.monotonic()
        # `timeout` sends its signal twice.
        again = asked and now - asked[-1] < _APART_S
        if before[number] != signal.SIG_IGN and not again:
            asked.append(now)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, hear)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
