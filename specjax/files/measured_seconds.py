"""Times that were measured on this machine, kept in the user's cache folder for later processes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.errors import InputError
from specjax.files import json_files, paths
from specjax.files.environment import cpu_model, num_cores, versions
from specjax.files.text_files import write_text


def seconds_file(*what: Any, device: jax.Device) -> Path | None:
    """The file of what was measured on a device, here and now; None where no cache folder can be.

    Two measurements are of one file if the representations of all parts of `what` are equal, and
    kinds of device, CPUs that the process may use, XLA's flags and versions, too.
    """
    # Machines that share a home folder may have other CPUs, all of which JAX calls "cpu", and a
    # process may be bound to a few cores of them.
    here = versions(), device.device_kind, cpu_model(), num_cores(), os.environ.get("XLA_FLAGS")
    key = repr((*here, *what))
    try:
        folder = paths.cache_folder("costs")
    except InputError:
        return None
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


class MeasuredSeconds(NamedTuple):
    """Figures, and when they were last measured, in seconds since 1970."""

    seconds: list[float]
    measured_at: float


def read_seconds(file: Path | None, count: int) -> MeasuredSeconds | None:
    """What a file has of `count` figures; None where it has none that are right."""
    if file is None or not file.exists():
        return None
    try:
        kept = json_files.read_json_file(file)
        seconds, measured_at = [float(value) for value in kept["seconds"]], float(kept["at"])
    except (InputError, OSError, TypeError, KeyError, ValueError):
        return None
    right = len(seconds) == count and all(0 < value < 1e6 for value in seconds)
    return MeasuredSeconds(seconds, measured_at) if right else None


def keep_seconds(
    file: Path | None, seconds: Sequence[float], measured_at: float | None = None
) -> None:
    """Write figures, measured just now unless `measured_at` says when.

    Where that fails, later processes measure again.
    """
    if file is None:
        return
    with suppress(OSError, InputError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"seconds": list(seconds), "at": measured_at or time.time()}))
