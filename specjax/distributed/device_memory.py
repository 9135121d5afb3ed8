"""Checks that compiled programs fit into free memory before they run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.distributed import processes
from specjax.errors import InputError

_GIB = 1 << 30


def check_fits(
    sizes: Sequence[Any], remedy: str, mesh: Mesh | None = None, *, begun: bool = False
) -> None:
    """Raise InputError, with the remedy, unless compiled programs that run in turn fit into memory.

    `sizes` are their `memory_analysis()`. The outputs of the first one are kept, and already exist
    if the programs have `begun`; existing arguments do not count. Nothing is checked if free memory
    is unknown, or if processes might get different results.
    """
    free = free_bytes()
    if free is None or None in sizes or processes.count() > 1:
        return
    output_bytes = 0 if begun else sizes[0].output_size_in_bytes - sizes[0].alias_size_in_bytes
    needed = output_bytes + max(size.temp_size_in_bytes for size in sizes)
    if mesh is not None and jax.default_backend() == "cpu":
        # Simulated devices of one host share its memory.
        needed *= mesh.size
    if needed > free:
        raise InputError(
            f"memory: {needed / _GIB:.1f} GiB are needed beside the weights, and "
            f"{free / _GIB:.1f} GiB are free; {remedy}"
        )


def free_bytes() -> int | None:
    """Return the free bytes of the device, or of the host on a CPU; None if unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if jax.default_backend() != "cpu":
        return None
    limits = [_available(), _left_in_group()]
    return min((limit for limit in limits if limit is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return None


def _left_in_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free bytes below a container's limit (cgroup v2); cached files count as free."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="utf-8"))
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        rows = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = next(int(row.split()[1]) for row in rows if row.startswith("inactive_file"))
    except (OSError, ValueError, StopIteration):
        return None
    return limit - used + cached
