"""Child processes that always end with the script."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from specjax import signals

INTERRUPTED = "interrupted; the same command resumes it"
"""The message after Ctrl-C if finished work is kept."""

GRACE_S = 120.0
"""The seconds that a process gets to save its work."""

_POLL_S = 0.25


def run_child(command: Sequence[str], *, log: IO[str] | None = None) -> int:
    """Run a command in a process of its own, with its output in `log`; return its exit code.

    Ctrl-C, SIGTERM and a closed terminal reach it as Ctrl-C. It then has GRACE_S seconds to end,
    after which KeyboardInterrupt is raised. At a second request it is killed. (`subprocess.run`
    would kill it after a quarter of a second.)
    """
    requests: list[int] = []
    # Recorded, not raised, so that nothing ends at a wrong moment.
    with signals.received_by(requests.append):
        # A session of its own, so that a terminal's Ctrl-C reaches it once, by way of this process.
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and not requests:
                _wait(child)
            code = child.poll()
            if code is None:
                child.send_signal(signal.SIGINT)
            end = time.monotonic() + GRACE_S
            while child.poll() is None and len(requests) < 2 and time.monotonic() < end:
                _wait(child)
        finally:
            child.kill()
            child.wait()
    if requests:
        raise KeyboardInterrupt
    return code


def _wait(child: subprocess.Popen) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(_POLL_S)
