"""Whether a compiled program fits into the memory that is free, found out before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.distributed import processes
from specjax.errors import InputError

_GIB = 1 << 30


def check_fits(programs: Sequence[Any], remedy: str, mesh: Mesh | None = None) -> None:
    """Raise InputError, with the remedy, unless compiled programs that run in turn can run here.

    What the first one gives is taken to stay; arguments that are there already do not count. Where
    free memory is unknown, or where processes might come to different answers, nothing is said.
    """
    sizes = [program.memory_analysis() for program in programs]
    free = free_bytes()
    if free is None or None in sizes or processes.count() > 1:
        return
    given = sizes[0].output_size_in_bytes - sizes[0].alias_size_in_bytes
    needed = given + max(size.temp_size_in_bytes for size in sizes)
    if mesh is not None and jax.default_backend() == "cpu":
        # Devices that are made of one host share its memory.
        needed *= mesh.size
    if needed > free:
        raise InputError(
            f"memory: {needed / _GIB:.1f} GiB are needed beside the weights, and "
            f"{free / _GIB:.1f} GiB are free; {remedy}"
        )


def free_bytes() -> int | None:
    """Bytes that a device can still give, or the host where the host is the device; else None."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if jax.default_backend() != "cpu":
        return None
    found = [_available(), _left_in_group()]
    return min((one for one in found if one is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return None


def _left_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves (cgroup v2); files that are cached can be given back."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="utf-8"))
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        rows = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = next(int(row.split()[1]) for row in rows if row.startswith("inactive_file"))
    except (OSError, ValueError, StopIteration):
        return None
    return limit - used + cached
