"""A writer of TensorBoard scalars, which are on disk when `write` returns.

tensorboardX's own `SummaryWriter` passes them to a thread, which dies on a full disk and leaves its
caller waiting forever. Here its events are written directly, and errors are raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specjax.errors import InputError


class TensorBoardWriter:
    """Writes scalars to a new event file in `directory`.

    The file tells TensorBoard to discard what earlier files have after `step`, from which the run
    resumes. Raises InputError if the file cannot be written, as `write` does.
    """

    def __init__(self, directory: Path, step: int) -> None:
        # Slow to import, and of no use to who only reads.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._directory, self._event, self._summary = directory, event_pb2, summary_pb2.Summary
        with self._writing():
            directory.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}.{step}")
        # What an interrupted run wrote after this step is no longer so.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=step + 1, session_log=start)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, by name, to disk; raise InputError if that fails."""
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written has been said
            self._events.close()

    def _add(self, **fields: Any) -> None:
        with self._writing():
            self._events.write_event(self._event.Event(wall_time=time.time(), **fields))
            self._events.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._directory}: cannot be written ({error.strerror or error}); free space, "
                "then start again"
            ) from None
