"""Versions of Python and packages, on which results depend."""

from __future__ import annotations

import importlib.metadata
import platform


def versions() -> dict[str, str]:
    """Return the versions on which a result depends, by name."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "specjax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
