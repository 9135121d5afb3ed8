"""Checks, before compiled programs run, that they fit into free memory."""

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
    """Raise InputError unless programs that run one after another fit into free memory.

    `sizes` are the `memory_analysis()` of the compiled programs; their arguments already exist and
    do not count. The outputs of the first program are kept throughout; they exist too if the run
    has `begun`. `remedy` ends the error message. Nothing is checked if free memory is unknown, or
    with several processes, which might get different results.
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
    """Return the free memory of the device in bytes, of the host on CPU; None if unknown."""
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
    """Return the bytes left below a container's memory limit (cgroup v2), or None if unknown.

    Memory of cached files counts as free.
    """
    try:
        limit = int((folder / "memory.max").read_text(encoding="utf-8"))
        used = int((folder / "memory.current").read_text(encoding="utf-8"))
        rows = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        cached = next(int(row.split()[1]) for row in rows if row.startswith("inactive_file"))
    except (OSError, ValueError, StopIteration):
        return None
    return limit - used + cached
