"""Scalars for TensorBoard, on disk when `write` returns.

tensorboardX's own `SummaryWriter` passes them to a thread, which ends where the disk is full and
leaves its caller waiting forever; here its event format is written directly, and the error raised.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import InputError


class TensorBoardWriter:
    """A new file of events in a directory, for a run that resumes after `step`.

    Raises InputError where it cannot be written, as `write` does.
    """

    def __init__(self, directory: Path, step: int) -> None:
        # Slow to import, and of no use to who only reads.
        from tensorboardX.proto import event_pb2

        self._event = event_pb2
        # The name is what TensorBoard looks for, and sorts by.
        name = f"events.out.tfevents.{time.time_ns() // 1000:019d}.{os.getpid()}"
        self._path = directory / name
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Unbuffered: nothing is left to be written when the file is closed.
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None
        self._add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # What an interrupted run wrote after this step is no longer so.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a step's numbers."""
        event = self._event.Event(wall_time=time.time(), step=step)
        for name, value in numbers.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        record = length + _masked_crc(length) + data + _masked_crc(data)
        try:
            if self._file.write(record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self._path.parent}: cannot be written ({error.strerror or error}); free space, then "
            "start again"
        )


def _masked_crc(data: bytes) -> bytes:
    """The checksum of TFRecord files: CRC-32C, rotated and shifted by a constant."""
    from tensorboardX.crc32c import crc32c

    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
