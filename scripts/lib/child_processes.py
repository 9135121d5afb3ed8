"""Child processes that always end with the script."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from specjax import signals

INTERRUPTED = "interrupted; the same command resumes it"
"""The message after Ctrl-C if finished work is kept."""

GRACE_S = 120.0
"""The seconds that a process gets to save its work."""

_POLL_S = 0.25


def run_child(
    command: Sequence[str],
    *,
    log: IO[str] | None = None,
    seconds: float = math.inf,
    grace_s: float | None = None,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command in a process of its own, with its output in `log`; return its exit code.

    Ctrl-C, SIGTERM and a closed terminal reach it as Ctrl-C. It then has `grace_s` seconds (by
    default GRACE_S) to end, after which KeyboardInterrupt is raised. At a second request it is
    killed. (`subprocess.run` would kill it after a quarter of a second.) After `seconds` it is
    stopped in the same way, but nothing is raised; the exit code is negative if it was killed.
    `folder` is its working directory, and `env` its environment.
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
            cwd=folder,
            env=env,
        )
        try:
            end = time.monotonic() + seconds
            while child.poll() is None and not requests and time.monotonic() < end:
                _wait(child)
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
            end = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
            while child.poll() is None and len(requests) < 2 and time.monotonic() < end:
                _wait(child)
        finally:
            child.kill()
            child.wait()
    if requests:
        raise KeyboardInterrupt
    return child.returncode


def _wait(child: subprocess.Popen) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(_POLL_S)
