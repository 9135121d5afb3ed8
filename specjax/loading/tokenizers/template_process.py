"""The process in which chat templates run.

jinja2's sandbox keeps a template away from Python's internals, but limits neither time nor memory:
nested loops run for minutes, and `'x'.ljust(3000000000)` is one call that cannot be interrupted
from inside. A process can be stopped from outside, so templates run in a fresh interpreter that
loads jinja2 and nothing of specjax (`template_renderer.py`). It starts with the first template and
serves all later ones, so that the start is paid once. It is not forked, since JAX already has
threads by then. It exits with this process, whose end of the connection closes, and is replaced
after a template exceeds the limits.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specjax.errors import InputError

_PROGRAM = Path(__file__).with_name("template_renderer.py")
_START_SECONDS = 60.0
_REMEDY = "give the prompt as raw text (chat=false for a command)"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of rendering one template: seconds of wall-clock time, bytes of memory, size of text.

    `memory` bounds the address space of the process, interpreter included, on systems with such a
    limit (Linux). `text` bounds the conversation in bytes, and the rendered prompt in characters.
    """

    seconds: int = 10
    memory: int = 512 << 20
    text: int = 16 << 20


LIMITS = TemplateLimits()


def render(request: bytes, limits: TemplateLimits = LIMITS) -> str:
    """Return the text that a template renders; `request` is JSON [template, variables].

    Raises InputError if the template fails or exceeds the limits.
    """
    if len(request) > limits.text:
        raise InputError(
            f"messages: {len(request)} bytes of JSON, and {limits.text >> 20} MiB are allowed; "
            "shorten the conversation"
        )
    with _lock:
        try:
            kind, text = _connected(limits).ask(request)
        except BaseException:  # Ctrl-C too: its answer must not be read for the next request
            close()
            raise
    if kind == "error":
        raise InputError(
            f"chat template: it fails on these messages ({text}); change them to what it "
            "takes, or give the prompt as raw text (chat=false for a command)"
        )
    return text


def close() -> None:
    """Stop the process, if there is one; the next template starts another."""
    global _child
    child, _child = _child, None
    if child is not None:
        child.close()


class _Child:
    """A running `template_renderer.py`, and the connection to it."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.connection, theirs = multiprocessing.Pipe()
        # The interpreter finds jinja2 where this one does, wherever that is.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        numbers = (limits.seconds, limits.memory, limits.text)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-S", str(_PROGRAM), *map(str, numbers)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C in a terminal is for this process alone
                )
            except OSError as error:
                self.connection.close()
                raise InputError(
                    f"chat template: no process can be started for it "
                    f"({error.strerror or error}); {_REMEDY}"
                ) from None
        try:
            self._receive(_START_SECONDS)
        except (OSError, EOFError, ValueError):
            self.close()
            raise InputError(
                f"chat template: the process that renders it does not start; see what "
                f"`{sys.executable} {_PROGRAM}` says, or {_REMEDY}"
            ) from None

    def ask(self, request: bytes) -> tuple[str, str]:
        """Send a request to the child; return its answer's kind, "text" or "error", and text.

        Raises InputError if the template exceeded the limits.
        """
        try:
            self.connection.send_bytes(request)
            kind, text = self._receive(self.limits.seconds)
        except TimeoutError:
            raise InputError(
                f"chat template: it takes more than {self.limits.seconds} seconds; {_REMEDY}"
            ) from None
        except (OSError, EOFError, ValueError):
            # The child ended without a message: it ran out of memory.
            raise InputError(
                f"chat template: it ended the process that renders it, as happens with more than "
                f"{self.limits.memory >> 20} MiB; {_REMEDY}"
            ) from None
        if kind == "over":
            size = (
                f"{self.limits.memory >> 20} MiB of memory"
                if text == "memory"
                else f"{self.limits.text} characters of text"
            )
            raise InputError(f"chat template: it takes more than {size}; {_REMEDY}")
        return kind, text

    def serves(self, limits: TemplateLimits) -> bool:
        """Return whether the child is still running, with these limits."""
        return self.limits == limits and self.process.poll() is None

    def close(self) -> None:
        """Close the connection and stop the child."""
        self.connection.close()
        with suppress(OSError):
            self.process.kill()
        self.process.wait()

    def _receive(self, seconds: float) -> tuple[str, str]:
        if not self.connection.poll(seconds):
            raise TimeoutError
        longest = 4 * self.limits.text + 16  # UTF-8 takes at most four bytes
        answer = self.connection.recv_bytes(longest).decode("utf-8", "surrogatepass")
        kind, _, text = answer.partition("\n")
        return kind, text


_child: _Child | None = None
_lock = threading.Lock()
atexit.register(close)


def _connected(limits: TemplateLimits) -> _Child:
    """Return this process's child with these limits, started if necessary."""
    global _child
    if _child is not None and not _child.serves(limits):
        close()
    if _child is None:
        _child = _Child(limits)
    return _child
