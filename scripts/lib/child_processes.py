"""Running commands in child processes that are always ended with the script."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from specjax import signals

INTERRUPTED = "interrupted; the same command resumes it"
"""The message of Ctrl-C where finished work is kept."""

GRACE_S = 120.0
"""Seconds that a process has to save its work."""

_LOOK_S = 0.25


def run_child(
    command: Sequence[str], *, log: IO[str] | None = None, until: float = math.inf
) -> int | None:
    """Run a command in a process of its own; returns its exit code, None where its time was over.

    Ctrl-C, SIGTERM and a closed terminal reach it as Ctrl-C, as does `until`, a time of
    `time.monotonic`. It then has GRACE_S to end; afterwards KeyboardInterrupt is raised, unless the
    reason was `until`. At a second request it is killed. Its output goes to `log`.
    """
    asked: list[int] = []
    # Noted, not raised, so that nothing ends at a wrong moment.
    with signals.received_by(asked.append):
        # A session of its own, so that a terminal's Ctrl-C reaches it once, by way of this process.
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
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
