"""Plans of the memory that compiled programs need, compared with the free memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files.log import LOGGER

CACHES = "caches of the target"
"""The name of the target's caches in the arrays of a `MemoryPlan`."""
_GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that compiled programs need on each device, in bytes, planned before allocation.

    `weights` exist already. `arrays` are allocated by the first program and kept, by what they
    hold. `temporaries` are those of the program with the most, since the programs run in turn.
    """

    weights: int
    arrays: dict[str, int]
    temporaries: int

    @property
    def needed(self) -> int:
        """The bytes per device that are needed in addition to the weights."""
        return sum(self.arrays.values()) + self.temporaries

    def __str__(self) -> str:
        parts = {"weights": self.weights, **self.arrays, "temporary arrays": self.temporaries}
        return ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts.items())

    def log_if_large(self) -> None:
        """Write a line about the plan to the log if it needs at least one GiB per device."""
        if self.needed >= _GIB:
            LOGGER.info("memory per device: %s", self)

    def check(
        self,
        remedy: str,
        rows: int = 0,
        capacity: int = 0,
        *,
        num_pages: int = 0,
        begun: bool = False,
    ) -> None:
        """Raise InputError if free memory is too small; the message says about how much would fit.

        The arrays are for `rows` rows of `capacity` tokens, or for a pool of `num_pages` pages, and
        already exist if the programs have `begun`. `remedy` is part of the message. Nothing is
        checked if free memory is unknown, or with several processes, which might get different
        results.
        """
        free = free_bytes()
        if free is None or processes.count() > 1:
            return
        missing = self.temporaries if begun else self.needed
        if missing <= free:
            return
        # Arrays and most temporary arrays have rows as an axis, and caches are most of the rest.
        row_fit = int(rows * free / missing)
        fits = [f"{row_fit} rows"] if row_fit and not num_pages else []
        room = free - (missing - self.arrays.get(CACHES, 0))
        size, unit = (num_pages, "pages") if num_pages else (capacity, "tokens per row")
        if size and not begun and room > 0:
            fits.append(f"{int(size * room / self.arrays[CACHES])} {unit}")
        fit = f" (about {' or '.join(fits)} would fit)" if fits else ""
        raise InputError(
            f"memory: {missing / _GIB:.1f} GiB are needed beside the weights, and "
            f"{free / _GIB:.1f} GiB are free; {remedy}{fit}. Per device: {self}"
        )


def check_weights(chosen: str, sizes: Mapping[str, int]) -> None:
    """Raise InputError if weights do not fit into free memory; the message says which would.

    `sizes` are the bytes on each device by setting, among them those of the one that is `chosen`.
    Nothing is checked if free memory is unknown, or with several processes, which might get
    different results.
    """
    free = free_bytes()
    if free is None or processes.count() > 1 or sizes[chosen] <= free:
        return
    fits = [
        f"{setting} takes {size / _GIB:.2g} GiB" for setting, size in sizes.items() if size <= free
    ]
    raise InputError(
        f"memory: the weights take {sizes[chosen] / _GIB:.2g} GiB on each device ({chosen}), and "
        f"{free / _GIB:.2g} GiB are free; {' and '.join(fits) or 'use more devices or memory'}"
    )


def temporary_bytes(programs: Sequence[Any], mesh: Mesh | None) -> int:
    """Return the bytes per device of the temporary arrays of the compiled program with the most."""
    analyses = [program.memory_analysis() for program in programs]
    most = max((each.temp_size_in_bytes for each in analyses if each), default=0)
    # Simulated devices of a CPU share the memory of their host.
    return most * (mesh.size if mesh is not None and jax.default_backend() == "cpu" else 1)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that a tree of arrays, or of shapes with shardings, takes on one device.

    On CPU, where simulated devices share the host's memory, the bytes of all devices count.
    """
    on_host = jax.default_backend() == "cpu"
    total = 0
    for leaf in jax.tree.leaves(tree):
        whole = on_host or leaf.sharding is None
        shape = leaf.shape if whole else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


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
