"""What a measurement depends on beside its program: versions, the model and cores of the CPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "specjax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def cpu_model() -> str:
    """The CPU's name, which JAX does not know; that of its kind where the system has none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            fields = [line.partition(":") for line in file]
    except OSError:
        fields = []
    named = (value.strip() for name, _, value in fields if name.strip() == "model name")
    return next(named, "") or platform.processor() or platform.machine()


def num_cores() -> int:
    """How many of the machine's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
