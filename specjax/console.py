"""What a person sees while work goes on: rich on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def working(console: Console, what: str) -> Iterator[None]:
    """Say what is under way, and how long it took."""
    begin = time.perf_counter()
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...", highlight=False)
        yield
    console.print(f"{what}: {time.perf_counter() - begin:.1f} s", highlight=False)


class RowProgress:
    """How many prompts are done, at how many tokens a second, and how long the rest will take."""

    def __init__(self, console: Console, total: int, quiet: bool = False) -> None:
        self._console, self._total = console, total
        self._begin = self._last = time.perf_counter()
        self._bar: Progress | None = None
        self._quiet = quiet
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("decoding"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, rate=0.0)

    def __enter__(self) -> RowProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, tokens_per_second: float) -> None:
        """`done` prompts are finished."""
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=tokens_per_second)
        elif not self._quiet and (now - self._last > _SECONDS_BETWEEN_LINES or done == self._total):
            self._last = now
            left = (now - self._begin) / max(done, 1) * (self._total - done)
            self._console.print(
                f"decoded {done}/{self._total} prompts, {tokens_per_second:.1f} tokens/s, "
                f"{left:.0f} s left",
                highlight=False,
            )


class TokenPrinter:
    """Streams text token by token; accepted drafts are green on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, text: str, drafted: bool) -> None:
        """Print a piece of text where the last one ended."""
        style = "bold green" if drafted else ""
        self._console.print(Text(text, style=style), end="", soft_wrap=True, highlight=False)
