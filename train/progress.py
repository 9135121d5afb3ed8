"""How far long work has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_LINE_EVERY_S = 30.0


class Progress:
    """Counts what is done of a total, and shows speed and the time that is left.

    Use it as a context. On a terminal it draws a bar, elsewhere it prints a line every half minute.
    """

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = self._skipped = 0
        self._begin = self._shown = time.monotonic()
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console())
            self._task = self._bar.add_task(title, total=total, speed="compiling")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        else:
            print(f"{self._title}: {self._total} {self._unit}; compiling first", flush=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()

    def skip(self, count: int) -> None:
        """Count what an earlier run has done: it is done, and says nothing about the speed."""
        self._skipped += count
        self.add(0)

    def add(self, count: int) -> None:
        """Count what was done now."""
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            done = self._done + self._skipped
            self._bar.update(self._task, completed=done, speed=self._speed(now))
        elif now - self._shown > _LINE_EVERY_S:
            self._line()
            self._shown = now

    def _speed(self, now: float) -> str:
        return f"{self._done / max(now - self._begin, 1e-9):.0f} {self._unit}/s"

    def _line(self) -> None:
        now = time.monotonic()
        done = self._done + self._skipped
        left = (self._total - done) * (now - self._begin) / max(self._done, 1)
        print(
            f"{self._title}: {done} of {self._total} {self._unit}, {self._speed(now)}, "
            f"{left / 60:.0f} min left",
            flush=True,
        )
